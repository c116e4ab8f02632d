"""Writing PerfLog lines: one JSON object a line, valid whatever the values are."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final, Protocol, final

from accelmark.spec.errors import RunError
from accelmark.spec.events import PERFLOG_PREFIX, Event
from accelmark.spec.model import Spec

_ENCODER: Final = json.JSONEncoder(allow_nan=False)


class EventLog(Protocol):
    """Whom a rank tells what happens."""

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Take in one event, which happened at ``at_ns`` of ``time.monotonic_ns``, or just now."""
        ...


@final
class PerfLog:
    """Writes the events of one rank to a file descriptor, a whole line in one system call."""

    def __init__(self, rank: int, descriptor: int = 1) -> None:
        self.rank = rank
        self._descriptor = descriptor

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Write one line; NaN and infinity become null and are named under ``nonfinite``.

        Args:
            event: its name.
            value: its fields.
            at_ns: when it happened, as a reading of ``time.monotonic_ns``; None: now.

        Raises:
            RunError: the line could not be written (the disk is full, say).
        """
        caller = sys._getframe(1)
        fields = value.model_dump() if isinstance(value, Spec) else dict(value or {})
        line = perflog_line(event, fields, _metadata(caller, self.rank, at_ns))
        try:
            write_all(self._descriptor, line.encode() + b"\n")
        except OSError as error:
            raise RunError(f"rank {self.rank} cannot write its log: {error.strerror or error}") from error


def _metadata(caller: FrameType, rank: int, at_ns: int | None) -> dict[str, Any]:
    now_ns = time.monotonic_ns()
    at_ns = now_ns if at_ns is None else at_ns
    return {
        "file": caller.f_code.co_filename.rpartition(os.sep)[2],
        "lineno": caller.f_lineno,
        "time_ms": int((time.time_ns() - now_ns + at_ns) / 1e6),
        "mono_ms": round(at_ns / 1e6, 3),
        "rank": rank,
    }


def perflog_line(event: Event, value: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the line, without its end, for one event."""
    record = {"event": event.value, "value": value, "metadata": metadata}
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        nonfinite = sorted(name for name, item in value.items() if _has_nonfinite(item))
        cleaned = {name: _finite(item) for name, item in value.items()}
        record["value"] = {**cleaned, "nonfinite": nonfinite}
        text = _ENCODER.encode(record)
    return PERFLOG_PREFIX + text


def _has_nonfinite(item: Any) -> bool:
    if isinstance(item, float):
        return not math.isfinite(item)
    if isinstance(item, Mapping):
        return any(_has_nonfinite(part) for part in item.values())
    if isinstance(item, list | tuple):
        return any(_has_nonfinite(part) for part in item)
    return False


def _finite(item: Any) -> Any:
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, Mapping):
        return {name: _finite(part) for name, part in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(part) for part in item]
    return item


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, going on after a short write."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
