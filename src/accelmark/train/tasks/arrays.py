"""Batches cut from NumPy arrays that hold a whole split, for frameworks without a loader of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.tasks.shares import Share, seed_of

Arrays = dict[str, npt.NDArray[Any]]
Augment = Callable[[Arrays, np.random.Generator], Arrays]
"""Augments a training batch, with random numbers from the generator only."""


@final
@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """A rank's place among the ranks that share the data, and the seed that they share."""

    rank: int
    world_size: int
    shared_seed: int


@final
class ArrayBatches:
    """A rank's batches of arrays with the samples along the first dimension.

    Each training epoch takes a new permutation, determined by seed and epoch; ``augment`` draws from a generator that
    is determined by seed, epoch and rank.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        batch_size: int,
        place: ArrayPlace,
        *,
        train: bool,
        augment: Augment | None = None,
    ) -> None:
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"the parts of the data hold different numbers of samples: {sizes}")
        self._arrays, self._place, self._augment = dict(arrays), place, augment
        self._share = Share(next(iter(sizes.values())), batch_size, place.rank, place.world_size, train)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Arrays]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        random = np.random.default_rng(seed_of(self._place.shared_seed, number, self._place.rank))
        for position, chosen in enumerate(self._share.indices(seed_of(self._place.shared_seed, number))):
            batch = {name: array[chosen] for name, array in self._arrays.items()}
            batch = batch if self._augment is None else self._augment(batch, random)
            if position >= skip:
                yield batch


_STEPS_IN_EPOCH: Final = 100
"""Optimizer steps in an epoch of synthetic data where the settings bound neither steps nor samples."""


def steps_of_synthetic_epoch(settings: TrainSettings, world_size: int) -> int:
    """Return the optimizer steps of an epoch of synthetic data: enough for the run's bound on steps or samples."""
    end = settings.end
    if end.max_steps is not None:
        return end.max_steps
    if end.max_samples is not None:
        step_samples = settings.batch_size * settings.gradient_accumulation_steps * world_size
        return max(1, -(-end.max_samples // step_samples))
    return _STEPS_IN_EPOCH


@final
class SyntheticArrayBatches:
    """One synthetic batch, repeated, for measuring speed only."""

    def __init__(self, batch: Arrays, settings: TrainSettings, world_size: int) -> None:
        self._batch = batch
        self._num_batches = steps_of_synthetic_epoch(settings, world_size) * settings.gradient_accumulation_steps
        self.num_samples = self._num_batches * settings.batch_size * world_size

    def epoch(self, number: int, skip: int = 0) -> Iterator[Arrays]:
        """Yield the batch repeatedly."""
        for _ in range(skip, self._num_batches):
            yield self._batch
