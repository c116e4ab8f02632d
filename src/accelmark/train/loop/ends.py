"""Decide when training ends, with one decision for all ranks and without synchronising them at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, final

from accelmark.spec.log.events import EndReason
from accelmark.spec.settings.training import EndSettings
from accelmark.train.loop.contract import Progress

POLL_INTERVAL_S: Final = 1.0
MAX_TRACE_SHARE: Final = 0.005
_WARM_STEPS: Final = 5
"""First steps, which are not traced: they compile, and open libraries."""
_LATE: Final = 1e15
"""Above any step number: the maximum of ``_LATE - step`` over the ranks gives the earliest step."""


class End(NamedTuple):
    """Why training ended; ``message`` has advice if it did not complete."""

    reason: EndReason
    message: str | None = None

    @property
    def completed(self) -> bool:
        """Whether training ran to an end that the settings name."""
        return self.reason not in ("nonfinite_loss", "out_of_memory", "cancelled", "error")


def bound_reached(end: EndSettings, progress: Progress, epochs_done: int) -> EndReason | None:
    """Return the bound of steps, samples or epochs that has been reached, or None."""
    if end.max_steps is not None and progress.global_steps >= end.max_steps:
        return "max_steps"
    if end.max_samples is not None and progress.num_trained_samples >= end.max_samples:
        return "max_samples"
    if end.max_epochs is not None and epochs_done >= end.max_epochs:
        return "max_epochs"
    return None


def total_steps(end: EndSettings, steps_per_epoch: int, samples_per_step: int) -> int | None:
    """Return the most optimizer steps that the bounds allow; None where only time bounds them."""
    samples, epochs = end.max_samples, end.max_epochs
    by_samples = None if samples is None else -(-samples // samples_per_step)
    by_epochs = None if epochs is None else epochs * steps_per_epoch
    return min((steps for steps in (end.max_steps, by_samples, by_epochs) if steps is not None), default=None)


class Vote(NamedTuple):
    """A rank's vote in the decision to end; :class:`Agreement` joins the votes of all ranks."""

    nonfinite_step: int | None = None
    cancelled: bool = False
    overtime: bool = False
    step_s: float = 0.0
    """Time of a step, which determines the distance to the next poll."""
    trace_s: float = 0.0

    def allows_trace(self, steps: int, num_traced: int) -> bool:
        """Return, on all ranks the same, whether another of ``steps`` may be traced, after ``num_traced``."""
        cost_s, time_s = (num_traced + 1) * self.trace_s, steps * self.step_s
        return steps >= _WARM_STEPS and cost_s <= MAX_TRACE_SHARE * time_s

    def encoded(self) -> list[float]:
        """Return numbers whose maximum over the ranks is the joint vote."""
        late = 0.0 if self.nonfinite_step is None else _LATE - self.nonfinite_step
        return [late, float(self.cancelled), float(self.overtime), self.step_s, self.trace_s]

    @classmethod
    def decoded(cls, values: list[float]) -> Vote:
        """Read the joint vote."""
        late, cancelled, overtime, step_s, trace_s = values
        return cls(int(_LATE - late) if late else None, bool(cancelled), bool(overtime), step_s, trace_s)


@final
class Agreement:
    """Polls the ranks about every second: votes are sent at one poll and read at the next, when they have arrived."""

    def __init__(self, exchange_max: Callable[[list[float]], Callable[[], list[float]]], most_steps: int) -> None:
        self._exchange = exchange_max
        self._most_steps = most_steps
        self._interval = 1
        self._pending: Callable[[], list[float]] | None = None
        self.next_step = 0

    def poll(self, step: int, vote: Vote) -> Vote | None:
        """Send this rank's vote, and return the joint vote of the poll before (None at the first)."""
        joint = self._collect()
        if joint is not None and joint.step_s > 0:
            self._interval = max(1, min(self._most_steps, int(POLL_INTERVAL_S / joint.step_s)))
        self._pending = self._exchange(vote.encoded())
        self.next_step = step + self._interval
        return joint

    def settle(self, vote: Vote) -> Vote:
        """Return the current joint vote, waiting for the other ranks, at the end of training."""
        self._collect()
        return Vote.decoded(self._exchange(vote.encoded())())

    def _collect(self) -> Vote | None:
        pending, self._pending = self._pending, None
        return None if pending is None else Vote.decoded(pending())


def nonfinite_end(step: int, last_loss: float | None, last_step: int | None) -> End:
    """Return the end for a loss that is NaN or infinite."""
    before = (
        "no step before it had a finite one" if last_loss is None else f"last finite: {last_loss:.6g} at {last_step}"
    )
    advice = "lower the learning rate, lengthen the warm-up, clip gradients, or use bf16 or fp32 in place of fp16"
    return End("nonfinite_loss", f"the loss was not finite at step {step} ({before}); {advice}")
