"""Divide a data set among ranks in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError


def seed_of(*parts: int) -> int:
    """Return a seed of 56 bits that depends on the numbers in ``parts`` (seed, epoch, sample) only."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@final
@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of the samples of an epoch.

    Training divides each epoch's permutation into global batches and drops an incomplete last one, so that all ranks
    take the same number of batches of the same size. Evaluation uses every sample once; all ranks take the same number
    of batches (sharded models need that), whose sizes may differ by one.

    Raises:
        DataError: there are fewer samples than one global batch, or than ranks for evaluation.
    """

    total: int
    batch_size: int
    rank: int
    world_size: int
    train: bool

    def __post_init__(self) -> None:
        """Check that each rank has a batch."""
        least = self.batch_size * self.world_size if self.train else self.world_size
        if self.total < least:
            kind = "one global training batch" if self.train else "one evaluation sample for every rank"
            raise DataError(f"the data has {self.total} samples, but {kind} needs {least}; use a smaller batch size")

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        step = self.batch_size * self.world_size
        return self.total // step * step if self.train else self.total

    @property
    def num_batches(self) -> int:
        """Batches of one epoch on each rank."""
        smallest, rest = divmod(self.total, self.world_size)
        if self.train:
            return smallest // self.batch_size
        return min(smallest, -(-(smallest + bool(rest)) // self.batch_size))

    def train_slices(self) -> list[slice]:
        """Return this rank's batches as slices of the epoch's permutation."""
        starts = ((batch * self.world_size + self.rank) * self.batch_size for batch in range(self.num_batches))
        return [slice(start, start + self.batch_size) for start in starts]

    def indices(self, epoch_seed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the sample indices of this rank's batches, for training in an order that ``epoch_seed`` determines."""
        if self.train:
            order = np.random.default_rng(epoch_seed).permutation(self.total)
            yield from (order[chosen] for chosen in self.train_slices())
        else:
            yield from np.array_split(np.arange(self.rank, self.total, self.world_size), self.num_batches)
