"""Optimizer steps of an epoch and of a training, steps that are taken again, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.settings.training import ScheduleSettings, TrainSettings
from accelmark.train.loop.contract import Backend, Progress, Replay
from accelmark.train.loop.ends import total_steps


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
