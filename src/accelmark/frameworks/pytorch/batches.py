"""Batches of a data set that any case can read: whole tensors in memory, or samples read one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accelmark.frameworks.pytorch.case import Batch, Place
from accelmark.spec.errors import DataError
from accelmark.spec.settings import LoaderSettings

Augment = Callable[[dict[str, Tensor], torch.Generator], dict[str, Tensor]]
"""Changes a training batch at random, with the generator's numbers only."""


def generator_for(*parts: int) -> torch.Generator:
    """Return a random generator that the numbers in ``parts`` (seed, epoch, sample) alone decide."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@final
class Shares:
    """Which samples a rank takes, batch by batch.

    Training deals each epoch's permutation out in global batches and drops what does not fill the last one, so that
    all ranks take equally many batches of equally many samples. Evaluation takes every sample exactly once; all ranks
    take equally many batches there too (sharded models need that), so their sizes may differ by one. Only batches of
    one sample may then have to grow to two, because a batch is never empty.
    """

    def __init__(self, num_samples: int, batch_size: int, place: Place, *, train: bool) -> None:
        self._total, self._batch_size, self._place, self._train = num_samples, batch_size, place, train
        least = batch_size * place.world_size if train else place.world_size
        if num_samples < least:
            kind = "one global training batch" if train else "one evaluation sample for every rank"
            raise DataError(f"the data has {num_samples} samples, but {kind} needs {least}; use a smaller batch size")

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        if not self._train:
            return self._total
        step = self._batch_size * self._place.world_size
        return self._total // step * step

    @property
    def num_batches(self) -> int:
        """Batches of one epoch on this rank, and on every other."""
        smallest_share, rest = divmod(self._total, self._place.world_size)
        if self._train:
            return smallest_share // self._batch_size
        return min(smallest_share, -(-(smallest_share + bool(rest)) // self._batch_size))

    def epoch(self, number: int) -> Iterator[Tensor]:
        """Iterate over this rank's batches of sample indices."""
        place, size = self._place, self._batch_size
        if self._train:
            order = torch.randperm(self._total, generator=generator_for(place.shared_seed, number))
            for batch in range(self.num_batches):
                start = (batch * place.world_size + place.rank) * size
                yield order[start : start + size]
        else:
            share = torch.arange(place.rank, self._total, place.world_size)
            yield from share.tensor_split(self.num_batches)


@final
class TensorBatches:
    """Batches cut from tensors that hold the whole data set, samples along the first dimension.

    Args:
        tensors: the data by name, on the CPU or on the device.
        augment: changes each training batch; its generator follows from seed, epoch and rank.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        batch_size: int,
        place: Place,
        *,
        train: bool,
        augment: Augment | None = None,
    ) -> None:
        sizes = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"the parts of the data hold different numbers of samples: {sizes}")
        self._tensors, self._place, self._augment = dict(tensors), place, augment
        self._shares = Shares(next(iter(sizes.values())), batch_size, place, train=train)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._shares.num_samples

    def epoch(self, number: int) -> Iterator[Batch]:
        """Iterate over this rank's batches of epoch ``number``."""
        random = generator_for(self._place.shared_seed, number, self._place.rank)
        for indices in self._shares.epoch(number):
            batch = {name: tensor[indices.to(tensor.device)] for name, tensor in self._tensors.items()}
            yield batch if self._augment is None else self._augment(batch, random)


class SampleSource(Protocol):
    """A data set that is read one sample at a time, in worker processes where the loader has some."""

    def __len__(self) -> int: ...

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return sample ``index``; its randomness comes from ``random``, which seed, epoch and index decide."""
        ...


EVALUATION_EPOCH: Final = -1
"""The epoch that evaluation samples are read under, so that they are the same at every evaluation."""


@final
class IndexedBatches:
    """Batches of a :class:`SampleSource`, read ahead by ``loader.num_workers`` processes (0: by this one)."""

    def __init__(
        self, source: SampleSource, batch_size: int, place: Place, loader: LoaderSettings, *, train: bool
    ) -> None:
        self._train = train
        self._shares = Shares(len(source), batch_size, place, train=train)
        self._order = _Order(self._shares)
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {"prefetch_factor": loader.prefetch, "persistent_workers": train}
        self._loader: DataLoader[Batch] = DataLoader(
            _Samples(source, place.shared_seed),
            batch_sampler=self._order,
            num_workers=loader.num_workers,
            **workers,
        )

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._shares.num_samples

    def epoch(self, number: int) -> Iterator[Batch]:
        """Iterate over this rank's batches of epoch ``number``."""
        self._order.epoch = number if self._train else EVALUATION_EPOCH
        yield from self._loader


class _Order:
    """The loader's batch sampler: (epoch, index) pairs, so that a worker needs to know nothing else."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.epoch = 0

    def __len__(self) -> int:
        return self._shares.num_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for indices in self._shares.epoch(epoch):
            yield [(epoch, index) for index in indices.tolist()]


class _Samples(Dataset[Mapping[str, Tensor]]):
    def __init__(self, source: SampleSource, seed: int) -> None:
        self._source, self._seed = source, seed

    def __getitem__(self, item: Any) -> Mapping[str, Tensor]:
        epoch, index = item
        return self._source.read(index, generator_for(self._seed, epoch, index))
