"""Optimizer steps of an epoch and of a training, and steps that are taken again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import final

from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.loop.contract import Backend, Progress, Replay
from accelmark.train.loop.ends import total_steps
from accelmark.train.schedules import learning_rate_factor, needs_length


@final
@dataclass(frozen=True)
class EpochSize:
    """Samples of an optimizer step over all ranks, and steps of an epoch."""

    samples_per_step: int
    steps_per_epoch: int

    @classmethod
    def of(cls, settings: TrainSettings, num_samples: int, world_size: int) -> EpochSize:
        """Divide the samples of an epoch into steps.

        Raises:
            DataError: there are fewer samples than a step needs.
        """
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
        """Return the optimizer steps over which the learning rate is scheduled.

        Raises:
            RequestError: the schedule needs their number, and only time bounds the training.
        """
        length = total_steps(settings.end, self.steps_per_epoch, self.samples_per_step)
        if length is None and needs_length(settings.schedule):
            raise RequestError(
                f"schedule.{settings.schedule.name} needs the number of steps: give end.max_steps, max_epochs or "
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
