"""Batches of a data set: a rank's share of it, cut from whole NumPy arrays or read sample by sample."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.settings.training import LoaderSettings, TrainSettings


def seed_of(*parts: int) -> int:
    """Return a seed of 56 bits that depends on the numbers in ``parts`` (seed, epoch, sample) only."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@final
@dataclass(frozen=True)
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


Arrays = dict[str, npt.NDArray[Any]]
Augment = Callable[[Arrays, np.random.Generator], Arrays]
"""Augments a training batch, with random numbers from the generator only."""


@final
@dataclass(frozen=True)
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


EVALUATION_EPOCH: Final = -1
"""Epoch number for evaluation samples, so that they are the same at every evaluation."""
T = TypeVar("T")


@final
class BadSamples:
    """Training samples that cannot be read; at most ``limit`` of them are replaced, by the next one that can be read.

    Which sample replaces another follows from the data alone, so that epochs can be repeated and resumed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found: dict[int, str] = {}
        self._unnamed: list[str] = []

    def read(self, read: Callable[[int], T], index: int, total: int) -> tuple[T, dict[int, str]]:
        """Return sample ``index`` of ``total`` or the one that replaces it, with the errors of those that it replaces.

        Raises:
            DataError: it cannot be read and ``limit`` is 0, or more than ``limit`` samples in a row cannot be read.
        """
        errors: dict[int, str] = {}
        while True:
            number = (index + len(errors)) % total
            try:
                return read(number), errors
            except DataError as error:
                if len(errors) >= min(self._limit, total - 1):
                    raise
                errors[number] = str(error)

    def add(self, errors: Mapping[int, str]) -> None:
        """Note the errors of samples that were replaced; raises DataError where they are more than ``limit``."""
        new = {number: error for number, error in errors.items() if number not in self._found}
        self._found |= new
        self._unnamed += new.values()
        if len(self._found) > self._limit:
            names = "\n  ".join(self._found.values())
            allowed = f"--tolerate-bad-samples allows {self._limit} on each rank"
            raise DataError(f"{len(self._found)} training samples cannot be read; {allowed}:\n  {names}")

    def named(self, batches: Iterable[T], log: EventLog) -> Iterator[T]:
        """Yield the batches, and log each sample that was replaced, before the batch that it was for."""
        for batch in batches:
            for error in self._unnamed:
                log.event(Event.BAD_SAMPLE, {"message": error})
            self._unnamed.clear()
            yield batch


def naming_bad_samples(batches: Iterator[T], source: object, log: EventLog) -> Iterator[T]:
    """Return the batches of ``source``, which are logged by :class:`BadSamples` where it reads sample by sample."""
    bad = getattr(source, "bad_samples", None)
    return bad.named(batches, log) if isinstance(bad, BadSamples) else batches


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
        self.bad_samples = BadSamples(loader.tolerate_bad_samples if train else 0)

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Arrays]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        epoch = number if self._train else EVALUATION_EPOCH
        chosen = islice(self._share.indices(seed_of(self._place.shared_seed, number)), skip, None)

        def read(indices: npt.NDArray[np.int64]) -> tuple[Arrays, dict[int, str]]:
            return self._read(epoch, indices)

        workers = self._loader.num_workers
        batches = read_ahead(read, chosen, workers, workers * self._loader.prefetch) if workers else map(read, chosen)
        for batch, errors in batches:
            self.bad_samples.add(errors)
            yield batch

    def _read(self, epoch: int, indices: npt.NDArray[np.int64]) -> tuple[Arrays, dict[int, str]]:
        def read(index: int) -> Arrays:
            return self._source.read(index, np.random.default_rng(seed_of(self._place.shared_seed, epoch, index)))

        found = [self.bad_samples.read(read, index, len(self._source)) for index in indices.tolist()]
        samples, errors = zip_strict(*found)
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch, {number: error for part in errors for number, error in part.items()}


def read_ahead(read: Callable[[Any], T], chosen: Iterator[Any], workers: int, depth: int) -> Iterator[T]:
    """Yield ``read`` of each item in order, computed by threads up to ``depth`` items ahead."""
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="samples") as pool:
        pending: deque[Future[T]] = deque(pool.submit(read, each) for each in islice(chosen, depth))
        try:
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(read, each) for each in islice(chosen, 1))
                yield batch
        finally:
            for waiting in pending:
                waiting.cancel()
