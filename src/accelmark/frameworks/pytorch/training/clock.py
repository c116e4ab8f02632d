"""Time steps without waiting for them: device events, or the monotonic clock where work is synchronous."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, final

import torch

from accelmark.train.loop.contract import StepClock

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
    """Device events, recorded in the current stream and reused after they are read."""

    def __init__(self, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event = new_event or (lambda: torch.Event(device, enable_timing=True))
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

    def keep(self, loss: torch.Tensor) -> float:
        """Return the value."""
        return loss.item()

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Return the values as they are."""
        return lambda: kept


@final
class DeviceLosses:
    """Losses of a device, copied together into pinned memory, without waiting, when the window closes."""

    def __init__(self, clock: StepClock, *, pinned: bool = True) -> None:
        self._clock = clock
        self._pinned = pinned

    def keep(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which is copied later."""
        return loss

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Start one asynchronous copy of all losses."""
        stacked = torch.stack([loss.float().reshape(()) for loss in kept])
        host = torch.empty(len(kept), dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(stacked, non_blocking=True)
        copied = self._clock.mark()

        def read() -> list[float]:
            copied.synchronize()
            self._clock.release([copied])
            return [float(value) for value in host.tolist()]

        return read
