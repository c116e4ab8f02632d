"""Mark where a rank's own part of a step ends, and the wait for other ranks begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, final

from accelmark.train.loop.contract import StepClock


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
