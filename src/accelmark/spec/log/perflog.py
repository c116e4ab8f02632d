"""PerfLog, the event format of the job side: encode, write, decode and read its lines.

One event is one line, ``[PerfLog] {"event": ..., "value": {...}, "metadata": {...}}``. JSON has no NaN and no infinity:
they are written as null, and the names of their fields are listed in ``value.nonfinite``.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from pydantic_core import from_json

from accelmark.spec.errors import RunError, raising
from accelmark.spec.log.events import Event
from accelmark.spec.model import Spec

S = TypeVar("S", bound=Spec)

PERFLOG_PREFIX: Final = "[PerfLog] "

_PREFIX: Final = PERFLOG_PREFIX.encode()
_NAME: Final = re.compile(re.escape(_PREFIX) + rb'\{"event": "([A-Z_]+)"')
_ENCODER: Final = json.JSONEncoder(allow_nan=False)


class EventLog(Protocol):
    """Receives the events of one rank."""

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Record one event; ``at_ns`` is its time on ``time.monotonic_ns``, None for now."""
        ...


class PerfLogWriter:
    """Writes the events of one rank to a file descriptor, each line in one system call."""

    def __init__(self, rank: int, descriptor: int = 1) -> None:
        self.rank = rank
        self._descriptor = descriptor

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Write one event; ``at_ns`` is its time on ``time.monotonic_ns``, None for now. Raises RunError."""
        caller, now_ns = sys._getframe(1), time.monotonic_ns()
        at_ns = now_ns if at_ns is None else at_ns
        metadata = {
            "file": caller.f_code.co_filename.rpartition(os.sep)[2],
            "lineno": caller.f_lineno,
            "time_ms": int((time.time_ns() - now_ns + at_ns) / 1e6),
            "mono_ms": round(at_ns / 1e6, 3),
            "rank": self.rank,
        }
        fields = value.model_dump() if isinstance(value, Spec) else dict(value or {})
        line = memoryview(encode_line(event, fields, metadata).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise RunError(f"rank {self.rank} cannot write its log: {error.strerror or error}") from error


def encode_line(event: str, value: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the PerfLog line of one event, without a newline."""
    record = {"event": str(event), "value": value, "metadata": metadata}
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        cleaned = finite(value)
        nonfinite = sorted(name for name, item in value.items() if cleaned[name] != item)
        record["value"] = {**cleaned, "nonfinite": nonfinite}
        text = _ENCODER.encode(record)
    return PERFLOG_PREFIX + text


def finite(item: Any) -> Any:
    """Return ``item`` with null for NaN and infinity; it equals ``item`` if there is none."""
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, Mapping):
        return {name: finite(part) for name, part in item.items()}
    if isinstance(item, tuple):
        return tuple(map(finite, item))
    return [finite(part) for part in item] if isinstance(item, list) else item


class PerfLogRecord(NamedTuple):
    """One decoded event."""

    event: str
    """Name of the event; a vendor's code may use names that are not in :class:`Event`."""
    value: Mapping[str, Any]
    time_ms: float
    mono_ms: float
    """Monotonic clock, comparable between the processes of one host."""
    rank: int

    def value_as(self, model: type[S]) -> S:
        """Return the value as the event's type, without ``nonfinite``. Raises pydantic's ValidationError."""
        return model.model_validate({key: item for key, item in self.value.items() if key != "nonfinite"})


def decode_line(line: bytes | str) -> list[PerfLogRecord]:
    """Return the valid records in a line: several if processes wrote at the same time; other output may precede them.

    The rest of the line is first decoded as one record, since a message inside a record may contain the prefix.
    """
    data = line.encode(errors="backslashreplace") if isinstance(line, str) else line
    start = data.find(_PREFIX)
    if start < 0:
        return []
    rest = data[start + len(_PREFIX) :]
    whole = _decode(rest)
    if whole is not None:
        return [whole]
    records = (_decode(piece[: piece.rfind(b"}") + 1]) for piece in rest.split(_PREFIX))
    return [record for record in records if record is not None]


def event_names(data: bytes) -> set[str]:
    """Return the names of the events in complete lines that AccelMark wrote, without decoding their values."""
    return {name.decode() for name in _NAME.findall(data)}


def _decode(text: bytes) -> PerfLogRecord | None:
    try:
        loaded = from_json(text, allow_inf_nan=False)
        metadata = loaded["metadata"]
        event, value = loaded["event"], loaded["value"]
        times = float(metadata["time_ms"]), float(metadata["mono_ms"])
        fields = value if isinstance(value, dict) else {}
        return PerfLogRecord(event, fields, *times, int(metadata["rank"])) if isinstance(event, str) else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


class PerfLogReader:
    """Iterates once over the records of a log that also has other output, and then has its counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.malformed = 0
        """Lines that contain the prefix but no valid record."""
        self.malformed_lines: tuple[int, ...] = ()
        self.truncated = False
        """The last line is incomplete: its writer was killed."""

    def __iter__(self) -> Iterator[PerfLogRecord]:
        with raising(RunError, f"{self.path}: cannot be read", OSError), self.path.open("rb", buffering=2**18) as file:
            for number, line in enumerate(file, 1):
                records = decode_line(line)
                yield from records
                if records or _PREFIX not in line:
                    continue
                if not line.endswith(b"\n"):
                    self.truncated = True
                    continue
                self.malformed += 1
                if self.malformed <= 5:
                    self.malformed_lines = (*self.malformed_lines, number)
