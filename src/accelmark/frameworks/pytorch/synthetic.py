"""Synthetic data: one batch, repeated, for measuring speed only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import torch

from accelmark.frameworks.pytorch.case import Batch, TrainCase
from accelmark.frameworks.pytorch.feed import mover
from accelmark.spec.settings import TrainSettings

_STEPS_IN_EPOCH: Final = 100
"""Optimizer steps in an epoch of synthetic data where the settings bound neither steps nor samples."""


@final
class SyntheticBatches:
    """One synthetic batch, already on the device and in its memory format, so that only computation is timed."""

    def __init__(self, case: TrainCase) -> None:
        settings = case.settings
        batch = case.synthetic_batch(settings.batch_size)
        self._batch: Batch = mover(case.place.device, channels_last=settings.channels_last)(batch)
        self._num_batches = _epoch_steps(settings, case.place.world_size) * settings.gradient_accumulation_steps
        self._world_size = case.place.world_size
        self._batch_size = settings.batch_size

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks: enough for the run's bound on steps or samples."""
        return self._num_batches * self._batch_size * self._world_size

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batch repeatedly."""
        for _ in range(self._num_batches):
            yield self._batch


def _epoch_steps(settings: TrainSettings, world_size: int) -> int:
    end = settings.end
    if end.max_steps is not None:
        return end.max_steps
    if end.max_samples is not None:
        step_samples = settings.batch_size * settings.gradient_accumulation_steps * world_size
        return max(1, -(-end.max_samples // step_samples))
    return _STEPS_IN_EPOCH


def batch_size_of(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))


def on_meta(batch: Batch) -> Batch:
    """Return a batch of the same shapes and types without data."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
