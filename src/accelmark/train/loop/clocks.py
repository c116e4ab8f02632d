"""Clocks of steps and readers of losses that need no framework."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, final

Mark = Any
"""A point in the device's time: an event, or nanoseconds."""


@final
class HostClock:
    """The monotonic clock, for devices whose work is done when a call returns (the CPU)."""

    mark: Final[Callable[[], int]] = staticmethod(time.monotonic_ns)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        return float(end - start) / 1e6

    def release(self, marks: list[Mark]) -> None:
        """Do nothing: marks are numbers."""


@final
class DeviceClock:
    """Device events, recorded in the current stream and reused after they are read.

    ``new_event`` returns an event with ``record()``, ``synchronize()`` and ``elapsed_time(end)`` in milliseconds.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []

    def mark(self) -> Mark:
        """Record an event in the current stream."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds that the device took between two events."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def release(self, marks: list[Mark]) -> None:
        """Reuse events."""
        self._free.extend(marks)


@final
class HostLosses:
    """Losses on the CPU: read at once, so that NaN is detected in its step."""

    def keep(self, loss: Any) -> float:
        """Return the value of a loss tensor with a single element."""
        value: float = loss.item()
        return value

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Return the values as they are."""
        return lambda: kept
