"""Windows of optimizer steps: collected without waiting for the device, read one window later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from accelmark.spec.events import StepWindow


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Where training stood when a window closed."""

    global_steps: int
    epoch: int
    num_trained_samples: int
    learning_rate: float


@final
@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """A window whose figures may still be on their way from the device."""

    standing: Standing
    marks: list[tuple[Any, Any]]
    data_wait_ns: list[int]
    closed_ns: int
    """Reading of the monotonic clock."""
    wall_ms: float
    losses: Callable[[], list[float]]

    @property
    def first_step(self) -> int:
        """Number of the window's first optimizer step, from 1."""
        return self.standing.global_steps - len(self.marks) + 1


@final
class Window:
    """Collects steps. ``clock`` and ``reader`` are :class:`Clock` and :class:`LossReader` of the backend."""

    def __init__(self, clock: Any, reader: Any) -> None:
        self._clock = clock
        self._reader = reader
        self._keep = reader.keep
        self._marks: list[tuple[Any, Any]] = []
        self._losses: list[Any] = []
        self._waits: list[int] = []

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, start: Any, end: Any, data_wait_ns: int, loss: Any) -> Any:
        """Take in one step, and return what the reader keeps of its loss (a float where it is at hand already)."""
        kept = self._keep(loss)
        self._marks.append((start, end))
        self._waits.append(data_wait_ns)
        self._losses.append(kept)
        return kept

    def last_is_nonfinite(self) -> bool:
        """Tell whether the last loss is NaN or infinite; only where the reader keeps floats."""
        return not math.isfinite(self._losses[-1])

    def close(self, standing: Standing, closed_ns: int, wall_ms: float) -> ClosedWindow:
        """Begin to bring the figures to the host, and start an empty window."""
        losses = self._reader.fetch(self._losses)
        closed = ClosedWindow(standing, self._marks, self._waits, closed_ns, wall_ms, losses)
        self._marks, self._losses, self._waits = [], [], []
        return closed

    def read(self, closed: ClosedWindow) -> StepWindow:
        """Return the figures of a closed window, waiting for its last step where it is still being computed."""
        losses = closed.losses()
        step_ms = tuple(round(self._clock.elapsed_ms(start, end), 4) for start, end in closed.marks)
        span_ms = self._clock.elapsed_ms(closed.marks[0][0], closed.marks[-1][1])
        self._clock.release([mark for pair in closed.marks for mark in pair])
        standing = closed.standing
        # Unchecked: every value is a number that was made right here, and a window closes between two steps.
        return StepWindow.model_construct(
            global_steps=standing.global_steps,
            epoch=standing.epoch,
            num_trained_samples=standing.num_trained_samples,
            learning_rate=standing.learning_rate,
            loss=losses[-1],
            losses=tuple(losses),
            step_ms=step_ms,
            data_wait_ms=tuple(round(wait / 1e6, 4) for wait in closed.data_wait_ns),
            wall_ms=round(closed.wall_ms, 4),
            span_ms=round(span_ms, 4),
        )


def first_nonfinite(window: StepWindow) -> int | None:
    """Return the number of the first step whose loss is NaN or infinite, or None."""
    first = window.global_steps - len(window.losses) + 1
    for number, loss in enumerate(window.losses, start=first):
        if loss is None or not math.isfinite(loss):
            return number
    return None
