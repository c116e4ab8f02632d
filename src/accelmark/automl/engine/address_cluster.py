"""A Ray cluster that runs already: reached by its address, with the token that its site gave out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MODE: Final = "RAY_AUTH_MODE"


@contextmanager
def address_cluster(address: str) -> Iterator[str]:
    """Give the address, with Ray told to show this machine's token where it has one.

    ``ray start`` uses a token that it finds, a program that joins does not unless told to: without this a cluster that
    ``ray start --head`` made here would refuse us.
    """
    if _MODE in os.environ or not has_token():
        yield address
        return
    os.environ[_MODE] = "token"
    try:
        yield address
    finally:
        os.environ.pop(_MODE, None)


def has_token() -> bool:
    """Tell whether there is a token at any of the places where Ray looks for one."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    places = [Path(named)] if named else [Path.home() / ".ray" / "auth_token"]
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or any(place.is_file() for place in places)
