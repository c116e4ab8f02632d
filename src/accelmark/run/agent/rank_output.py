"""What a rank's log says of its end: PerfLog's last word, an exception, or the last lines, made printable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

from accelmark.spec.events import Event
from accelmark.spec.perflog import PERFLOG_PREFIX, decode_line

LAST_LINES: Final = 20
_TAIL_BYTES: Final = 256 * 1024
_LONGEST_LINE: Final = 500
_EXCEPTION: Final = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Fault)(?::.*)?$"
)
_FATAL: Final = re.compile(r"^(?:Fatal Python error|terminate called|Segmentation fault|Killed)\b.*")
_NOT_BEGUN: Final = re.compile(
    r"^(?:.*/)?python[\w.]*: (?:Error while finding module specification for |No module named |can't open file ).+"
)
"""What Python says, without a traceback, where it finds nothing to run."""


@final
@dataclass(frozen=True, slots=True)
class LastWords:
    """The end of a rank's log."""

    lines: tuple[str, ...]
    finished: Mapping[str, Any] | None
    """The value of its ``FINISHED`` event, if it wrote one."""
    cause: str | None
    """One line for people: its own message, the exception, else nothing."""

    @property
    def completed(self) -> bool:
        """Whether the rank said of itself that it did all it was asked."""
        return self.finished is not None and self.finished.get("state", "completed") == "completed"

    @property
    def cancelled(self) -> bool:
        """Whether the rank said that it ended early because it was asked to."""
        return self.finished is not None and self.finished.get("state") == "cancelled"


def printable(text: str) -> str:
    r"""Return ``text`` with everything that a terminal or a JSON reader would trip over written as ``\xNN``."""
    shown = "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]} …"


def tail(path: Path, num_bytes: int = _TAIL_BYTES) -> list[str]:
    r"""Return the last lines of a file, undecodable bytes written as ``\xNN``; nothing where there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            data = file.read(num_bytes)
    except OSError:
        return []
    lines = data.decode("utf-8", errors="backslashreplace").split("\n")
    return lines[1:] if size > num_bytes else lines


def last_words(path: Path) -> LastWords:
    """Read the end of a rank's log."""
    lines = tail(path)
    finished: Mapping[str, Any] | None = None
    error: str | None = None
    for event in chain.from_iterable(map(decode_line, lines)):
        if event.event == Event.FINISHED:
            finished = event.value
        elif event.event == Event.ERROR:
            error = _message(event.value) or error
    prose = [line for line in lines if line.strip() and PERFLOG_PREFIX not in line]
    own = _message(finished) if finished is not None and finished.get("state", "completed") != "completed" else None
    cause = own or error or next(_exceptions(reversed(prose)), None)
    shown = [line for line in lines if line.strip()][-LAST_LINES:]
    return LastWords(tuple(map(printable, shown)), finished, printable(cause) if cause else None)


def _message(value: Mapping[str, Any]) -> str | None:
    message = value.get("message") or value.get("reason")
    return " ".join(str(message).split()) if message else None


def _exceptions(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if _EXCEPTION.match(line) or _FATAL.match(line) or _NOT_BEGUN.match(line):
            yield line.strip()
