"""Reading the log of a rank: PerfLog lines among whatever else the processes printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from pydantic_core import from_json

from accelmark.spec.errors import RunError
from accelmark.spec.events import PERFLOG_PREFIX

LONGEST_LINE: Final = 16 * 2**20
"""Bytes of one line that are looked at; the rest of a longer line is passed over."""

_PREFIX: Final = PERFLOG_PREFIX.encode()
_MALFORMED_KEPT: Final = 5


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One PerfLog line."""

    event: str
    """The name; vendors' code may emit names of its own."""
    value: Mapping[str, Any]
    time_ms: float
    """Wall clock, Unix milliseconds."""
    mono_ms: float
    """Monotonic clock, comparable between the processes of one host."""
    rank: int


@final
@dataclass(slots=True)
class ReadReport:
    """What reading a log came across."""

    lines: int = 0
    records: int = 0
    malformed: int = 0
    """Lines that bear the prefix but are no PerfLog record."""
    malformed_lines: tuple[int, ...] = ()
    """Numbers (from 1) of the first few of them."""
    torn: bool = False
    """The last line broke off, as it does when a writer is killed."""


class PerfLog:
    """The records of one log, read as a stream; ``report`` is complete once the iteration is.

    Memory does not grow with the file: one line is held at a time, and at most :data:`LONGEST_LINE` bytes of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = ReadReport()

    def __iter__(self) -> Iterator[Record]:
        self.report = ReadReport()
        try:
            with self.path.open("rb", buffering=2**18) as file:
                yield from self._records(file)
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        report = self.report
        while line := file.readline(LONGEST_LINE):
            report.lines += 1
            complete = line.endswith(b"\n")
            if not complete and len(line) == LONGEST_LINE:
                complete = _skip_line(file)
            start = line.find(_PREFIX)
            if start < 0:
                continue
            found = _parse_line(line, start)
            if found:
                report.records += len(found)
                yield from found
            elif complete:
                report.malformed += 1
                if report.malformed <= _MALFORMED_KEPT:
                    report.malformed_lines = (*report.malformed_lines, report.lines)
            else:
                report.torn = True


def _skip_line(file: BinaryIO) -> bool:
    """Pass over the rest of a line in pieces; False when the file ends first."""
    while rest := file.readline(LONGEST_LINE):
        if rest.endswith(b"\n"):
            return True
    return False


def _parse_line(line: bytes, start: int) -> list[Record]:
    """Return the records of a line; two processes may have written into one, so each prefix begins a new try.

    The whole rest of the line is tried first, because a message inside a record may quote the prefix.
    """
    whole = _parse(line[start + len(_PREFIX) :])
    if whole is not None:
        return [whole]
    pieces = line[start + len(_PREFIX) :].split(_PREFIX)
    records = (_parse(piece[: piece.rfind(b"}") + 1]) for piece in pieces)
    return [record for record in records if record is not None]


def _parse(text: bytes) -> Record | None:
    try:
        loaded = from_json(text, allow_inf_nan=False)
        metadata = loaded["metadata"]
        event, value = loaded["event"], loaded["value"]
        if not isinstance(event, str):
            return None
        return Record(
            event=event,
            value=value if isinstance(value, dict) else {},
            time_ms=float(metadata["time_ms"]),
            mono_ms=float(metadata["mono_ms"]),
            rank=int(metadata["rank"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
