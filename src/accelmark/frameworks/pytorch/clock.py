"""Timing steps without waiting for them: device events, or the monotonic clock where work is synchronous."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol, final

import torch

Mark = Any
"""A point in the device's time: an event, or nanoseconds."""


class Clock(Protocol):
    """Marks points in the time of the device; the time between two is read later."""

    def mark(self) -> Mark:
        """Mark the present point of the device's queue of work; does not wait."""
        ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks, waiting for the second where it has not come yet."""
        ...

    def release(self, marks: list[Mark]) -> None:
        """Say that marks will not be read again."""
        ...


@final
class HostClock:
    """The monotonic clock, for devices whose work is done when a call returns (the CPU)."""

    mark: Final[Callable[[], int]] = staticmethod(time.monotonic_ns)

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        return float(end - start) / 1e6

    def release(self, marks: list[Mark]) -> None:
        """Nothing to give back."""


@final
class DeviceClock:
    """Device events, recorded in the current stream and used again once they are read."""

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
        """Take events back to be recorded anew."""
        self._free.extend(marks)


class LossReader(Protocol):
    """Brings the losses of a window to the host."""

    def keep(self, loss: torch.Tensor) -> Any:
        """Take the loss of a step; does not wait for a device."""
        ...

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Begin to copy kept losses, and return what waits for them."""
        ...


@final
class HostLosses:
    """Losses that are on the CPU already: read at once, so that NaN is seen in its own step."""

    def keep(self, loss: torch.Tensor) -> float:
        """Return the value."""
        return loss.item()

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Return the values as they are."""
        return lambda: kept


@final
class DeviceLosses:
    """Losses copied together into pinned memory, without waiting, when the window closes."""

    def __init__(self, clock: Clock, *, pinned: bool = True) -> None:
        self._clock = clock
        self._pinned = pinned

    def keep(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor, to be copied later."""
        return loss

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Begin one asynchronous copy of all losses."""
        stacked = torch.stack([loss.float().reshape(()) for loss in kept])
        host = torch.empty(len(kept), dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(stacked, non_blocking=True)
        copied = self._clock.mark()

        def read() -> list[float]:
            copied.synchronize()
            self._clock.release([copied])
            return [float(value) for value in host.tolist()]

        return read
