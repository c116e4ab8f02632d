"""Clocks of steps and readers of losses that need no framework."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, final

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

    def fetch(self, losses: list[Any]) -> Callable[[], list[float]]:
        """Return the values as they are."""
        return lambda: losses


class _Hook(Protocol):
    def remove(self) -> object: ...


Watch = Callable[[Callable[[Any], None]], _Hook]
"""Has a function called with the gradient of one parameter in every backward pass, before it is exchanged."""


@final
class OwnPart:
    """Marks the last gradient of each backward pass, before its exchange: where ranks exchange gradients only.

    The first pass shows whose gradient is the last; from then on only that one is watched.
    """

    def __init__(self, watches: Sequence[Watch], clock: StepClock) -> None:
        self._watches = watches
        self._clock = clock
        self._mark: Any = None
        self._last = 0
        self._hooks = [watch(partial(self._arrived, index)) for index, watch in enumerate(watches)]

    def _arrived(self, index: int, _gradient: Any) -> None:
        if self._mark is not None:
            self._clock.release([self._mark])
        self._mark, self._last = self._clock.mark(), index

    def take(self) -> Any:
        """Return the mark of the last backward pass since the last call; None where there was none."""
        if len(self._hooks) > 1 and self._mark is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = [self._watches[self._last](partial(self._arrived, self._last))]
        mark, self._mark = self._mark, None
        return mark
