"""Parts of the standard library of Python 3.10 and 3.11 for agents and ranks, which run on 3.9."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enumeration of strings; ``str`` of a member is its value."""

        __str__ = str.__str__
        __format__ = str.__format__


if sys.version_info >= (3, 10):
    from importlib.metadata import entry_points
    from itertools import pairwise
else:
    import importlib.metadata
    from itertools import tee, zip_longest

    def entry_points(group: str) -> Any:
        """Return the entry points of a group."""
        return importlib.metadata.entry_points().get(group, ())

    def pairwise(iterable: Any) -> Any:
        """Yield each item with the one after it."""
        items, others = tee(iterable)
        next(others, None)
        return zip(items, others)


if TYPE_CHECKING:
    zip_strict = zip
elif sys.version_info >= (3, 10):
    zip_strict = partial(zip, strict=True)
else:

    def zip_strict(*iterables):
        """Yield as ``zip`` does; raise ValueError where the lengths differ."""
        end = object()
        for row in zip_longest(*iterables, fillvalue=end):
            if any(item is end for item in row):
                raise ValueError("zip_strict: the lengths differ")
            yield row


__all__ = ["StrEnum", "entry_points", "pairwise", "zip_strict"]
