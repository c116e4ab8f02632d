"""Steps of an epoch, learning rates, and when training ends: one decision of all ranks, not awaited at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.log.events import EndReason
from accelmark.spec.settings.training import EndSettings, ScheduleSettings, TrainSettings
from accelmark.train.loop.contract import Backend, Progress, Replay

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


def learning_rate_factor(settings: ScheduleSettings, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the learning rate over its peak as a function of the optimizer step, from 0.

    The warm-up rises linearly and reaches the peak at its last step; ``onecycle`` rises by a half cosine instead, from
    1/25 of the peak, as in Smith and Topin (arXiv:1708.07120), ``tri_stage`` from 1/100. After ``total_steps`` the
    factor is constant, except for ``inverse_sqrt``, where it falls with the root of the step from the end of the
    warm-up (Vaswani et al. 2017, arXiv:1706.03762, section 5.3). ``tri_stage`` is fairseq's of that name: constant
    until half of the steps, then an exponential fall.
    """
    warmup = settings.warmup_steps or round(settings.warmup_ratio * total_steps)
    decay_steps = max(1, total_steps - warmup)

    def from_to_one(low: float, share: float) -> float:
        return low + (1.0 - low) * share

    def factor(step: int) -> float:
        if step < warmup:
            if settings.name == "onecycle":
                return from_to_one(1 / 25, (1 - math.cos(math.pi * step / warmup)) / 2)
            return from_to_one(0.01 if settings.name == "tri_stage" else 0.0, (step + 1) / warmup)
        if settings.name == "constant":
            return 1.0
        if settings.name == "step":
            return settings.step_gamma ** (step // max(1, settings.step_epochs * steps_per_epoch))
        if settings.name == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        if settings.name == "tri_stage":
            return math.pow(settings.final_lr_ratio, min(1.0, max(0.0, 2 * (step + 1) / total_steps - 1)))
        left = 1 - min(1.0, (step - warmup) / decay_steps)
        if settings.name == "polynomial":
            left = left**settings.power
        elif settings.name in ("cosine", "onecycle"):
            left = (1 - math.cos(math.pi * left)) / 2
        return from_to_one(settings.final_lr_ratio, left)

    return factor


def scaled_learning_rate(settings: TrainSettings, world_size: int, batch_size: int) -> float:
    """Return ``optimizer.lr``, for a global batch of ``batch_size``, scaled by it (Goyal et al., arXiv:1706.02677)."""
    return settings.optimizer.lr * settings.batch_size * settings.gradient_accumulation_steps * world_size / batch_size


class EpochSize(NamedTuple):
    """Samples of an optimizer step over all ranks, and steps of an epoch."""

    samples_per_step: int
    steps_per_epoch: int

    @classmethod
    def of(cls, settings: TrainSettings, num_samples: int, world_size: int) -> EpochSize:
        """Divide the samples of an epoch into steps. Raises DataError: there are fewer samples than a step needs."""
        per_round = settings.batch_size * world_size
        samples_per_step = per_round * settings.gradient_accumulation_steps
        steps_per_epoch = num_samples // per_round // settings.gradient_accumulation_steps
        if steps_per_epoch == 0:
            raise DataError(
                f"the training data has {num_samples} samples, fewer than the {samples_per_step} of one optimizer step "
                "over all ranks; lower batch_size or gradient_accumulation_steps"
            )
        return cls(samples_per_step, steps_per_epoch)

    def schedule_length(self, settings: TrainSettings) -> int:
        """Return the steps of the schedule. Raises RequestError: only time bounds training, and it needs them."""
        length = total_steps(settings.end, self.steps_per_epoch, self.samples_per_step)
        schedule = settings.schedule
        by_ratio = schedule.warmup_ratio > 0 and schedule.warmup_steps == 0
        if length is None and (by_ratio or schedule.name not in ("constant", "step", "inverse_sqrt")):
            raise RequestError(
                f"schedule.{schedule.name} needs the number of steps: give end.max_steps, max_epochs or "
                "max_samples in addition to max_duration_s"
            )
        return length if length is not None else self.steps_per_epoch

    def learning_rate(self, settings: TrainSettings, peak: float) -> Callable[[int], float]:
        """Return the learning rate as a function of the optimizer steps done."""
        factor = learning_rate_factor(settings.schedule, self.schedule_length(settings), self.steps_per_epoch)
        return lambda steps_done: peak * factor(steps_done)


def repeat_steps(backend: Backend, progress: Progress, num_steps: int) -> Replay:
    """Take ``num_steps`` optimizer steps from the state at ``progress``, and return their losses."""
    replay = Replay(progress.global_steps + 1)
    epoch, skipped_steps = divmod(progress.global_steps, backend.steps_per_epoch)
    while len(replay.losses) < num_steps:
        if skipped_steps == backend.steps_per_epoch:
            epoch, skipped_steps = epoch + 1, 0
        left = min(num_steps - len(replay.losses), backend.steps_per_epoch - skipped_steps)
        for batches in islice(backend.open_epoch(epoch, skipped_steps), left):
            replay.losses.append(float(backend.step(batches)))
        skipped_steps += left
    return replay
