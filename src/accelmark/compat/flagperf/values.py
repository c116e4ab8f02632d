"""Values of FlagPerf's files with their locations, and their conversion to types."""

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
    "FLAGPERF_PATH": "hosts need no clone: AccelMark delivers its own code",
    "FLAGPERF_LOG_PATH": "runs are written below runs/, or to --out",
    "LOG_CALL_INFORMATION": "AccelMark's log lines always have file and line",
    "vendor": "the file's folder names the vendor",
    "dist_backend": "vendor.yaml names the backend (collective_backend)",
    "ddp_type": "the case's setting parallelism has it",
}
"""Settings without an equivalent -> the reason."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """One setting and its location."""

    file: str
    key: str
    value: Any

    @property
    def is_set(self) -> bool:
        """Whether it has a value; None and blank strings count as none."""
        return self.value is not None and not (isinstance(self.value, str) and not self.value.strip())

    def left(self, why: str) -> Problem:
        """Return the problem that reports why it was not converted."""
        return Problem(self.file, self.key, why)

    def read(self, kind: Callable[[Any], T]) -> T:
        """Return the value converted by ``kind``.

        Raises:
            SpecError: the conversion fails.
        """
        try:
            return kind(self.value)
        except (ValueError, TypeError) as error:
            raise SpecError([self.left(f"{error}, found {self.value!r}")]) from error


def settings_in(parsed: Parsed) -> list[Given]:
    """Return every setting of a file."""
    return [Given(parsed.file, key, value) for key, value in parsed.values.items()]


def text(value: Any) -> str:
    """Convert a string or an integer to a string."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError("is not text")


def texts(value: Any) -> list[str]:
    """Convert a list of strings, or a string separated by commas or blanks."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise TypeError("is neither a list nor text")
    return [text(item) for item in value]


def whole(value: Any) -> int:
    """Convert an integer, or a string that contains one."""
    written = "" if isinstance(value, float) else text(value)
    if not written.isascii() or not written.isdigit():
        raise ValueError("is not a whole number")
    return int(written)


def flag(value: Any) -> bool:
    """Convert True or False."""
    if isinstance(value, bool):
        return value
    raise TypeError("is neither True nor False")
