"""Batches of a data set that is read sample by sample as NumPy arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.tasks.arrays import ArrayPlace, Arrays
from accelmark.train.tasks.shares import Share, seed_of

EVALUATION_EPOCH: Final = -1
"""Epoch number for evaluation samples, so that they are the same at every evaluation."""


class ArraySource(Protocol):
    """A data set that is read one sample at a time."""

    def __len__(self) -> int: ...

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return sample ``index``; ``random`` is seeded by seed, epoch and index."""
        ...


@final
class SampleBatches:
    """A rank's batches of an :class:`ArraySource`; each of ``loader.num_workers`` threads reads ``prefetch`` ahead."""

    def __init__(
        self, source: ArraySource, batch_size: int, place: ArrayPlace, loader: LoaderSettings, *, train: bool
    ) -> None:
        self._source, self._place, self._loader, self._train = source, place, loader, train
        self._share = Share(len(source), batch_size, place.rank, place.world_size, train)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Arrays]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        epoch = number if self._train else EVALUATION_EPOCH
        chosen = islice(self._share.indices(seed_of(self._place.shared_seed, number)), skip, None)

        def read(indices: npt.NDArray[np.int64]) -> Arrays:
            return self._read(epoch, indices)

        workers = self._loader.num_workers
        return _ahead(read, chosen, workers, workers * self._loader.prefetch) if workers else map(read, chosen)

    def _read(self, epoch: int, indices: npt.NDArray[np.int64]) -> Arrays:
        samples = [
            self._source.read(index, np.random.default_rng(seed_of(self._place.shared_seed, epoch, index)))
            for index in indices.tolist()
        ]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _ahead(
    read: Callable[[npt.NDArray[np.int64]], Arrays], chosen: Iterator[Any], workers: int, depth: int
) -> Iterator[Arrays]:
    """Yield ``read`` of each item in order, computed by threads up to ``depth`` items ahead."""
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="samples") as pool:
        pending: deque[Future[Arrays]] = deque(pool.submit(read, each) for each in islice(chosen, depth))
        try:
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(read, each) for each in islice(chosen, 1))
                yield batch
        finally:
            for waiting in pending:
                waiting.cancel()
