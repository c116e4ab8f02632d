"""What FlagPerf's files give: each value with its place, and the forms that values are read in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from accelmark.compat.flagperf.parse import Parsed
from accelmark.spec.errors import Problem, SpecError

T = TypeVar("T")
Values = dict[str, Any]
IGNORED: Final = {
    "FLAGPERF_PATH": "hosts need no clone: AccelMark brings itself along",
    "FLAGPERF_LOG_PATH": "runs go below runs/, or where --out says",
    "LOG_CALL_INFORMATION": "log lines of AccelMark always say where they come from",
    "vendor": "the folder that the file lies in names the vendor",
    "dist_backend": "vendor.yaml names the backend (distributed_backend)",
    "ddp_type": "settings.parallelism of the case says it",
}
"""Settings that AccelMark has no use for -> why."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """One setting, and where it stands."""

    file: str
    key: str
    value: Any

    @property
    def is_set(self) -> bool:
        """Tell whether it says anything: None and a blank text do not."""
        return self.value is not None and not (isinstance(self.value, str) and not self.value.strip())

    def left(self, why: str) -> Problem:
        """Return the line that says why it was not carried over."""
        return Problem(self.file, self.key, why)

    def read(self, kind: Callable[[Any], T]) -> T:
        """Return the value as ``kind`` reads it.

        Raises:
            SpecError: it is nothing of the kind.
        """
        try:
            return kind(self.value)
        except (ValueError, TypeError) as error:
            raise SpecError([self.left(f"{error}, found {self.value!r}")]) from error


def settings_in(parsed: Parsed) -> list[Given]:
    """Return every setting of a file."""
    return [Given(parsed.file, key, value) for key, value in parsed.values.items()]


def text(value: Any) -> str:
    """Read a text; a whole number is one too."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError("is no text")


def texts(value: Any) -> list[str]:
    """Read a list of texts, or one text with commas or blanks between."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise TypeError("is neither a list nor a text")
    return [text(item) for item in value]


def whole(value: Any) -> int:
    """Read a whole number, also one written as a text."""
    written = "" if isinstance(value, float) else text(value)
    if not written.isascii() or not written.isdigit():
        raise ValueError("is no whole number")
    return int(written)


def flag(value: Any) -> bool:
    """Read True or False."""
    if isinstance(value, bool):
        return value
    raise TypeError("is neither True nor False")
