"""Batches of a data set: a rank's share of it, cut from whole NumPy arrays or read sample by sample."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, Union

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.settings.training import LoaderSettings, TrainSettings

Indices = npt.NDArray[np.int64]
Permutation = Union[npt.NDArray[np.int32], npt.NDArray[np.int64]]
MOST_INT32: Final = 2**31
"""Permutations of at most as many samples are int32: in half of the memory, and in the same order."""
T = TypeVar("T")
B = TypeVar("B", covariant=True)
R = TypeVar("R")


def seed_of(*parts: int) -> int:
    """Return a seed of 56 bits that depends on the numbers in ``parts`` (seed, epoch, sample) only."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:7], "big")


@dataclass(frozen=True)
class ArrayPlace:
    """A rank's place among the ranks that share the data, and the seed that they share."""

    rank: int
    world_size: int
    shared_seed: int


class BatchSource(Protocol[B]):
    """A rank's share of a data set, in batches with the samples along the first dimension."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks, without a dropped last batch."""

    def epoch(self, number: int, skip: int = 0) -> Iterator[B]:
        """Iterate over epoch ``number`` (from 0) from batch ``skip`` on, in an order that its number and the seed fix.

        All ranks yield equally many batches of equally many samples when training. A run that is resumed, and each
        replay, begin within an epoch: batches before ``skip`` should not be read.
        """


Arrays = dict[str, npt.NDArray[Any]]
Batches = BatchSource[Arrays]


class DataSetCase:
    """A case with a data set; a case that builds its own batches overrides ``train_batches`` and ``eval_batches``."""

    settings: TrainSettings

    def dataset(self, *, train: bool) -> Any:
        """Return the training or the evaluation data: whole arrays by name, or a source that is read by sample."""
        raise NotImplementedError(f"{type(self).__name__} defines neither dataset() nor its own batches")

    def augment(self, batch: Any, random: Any) -> Any:
        """Change a training batch, with random numbers from ``random`` only."""
        return batch

    def train_batches(self) -> Any:
        """Return this rank's share of the training data in a new order each epoch, ``batch_size`` samples a batch."""
        return self._batches(self.dataset(train=True), self.settings.batch_size, train=True)

    def eval_batches(self) -> Any:
        """Return this rank's share of the evaluation data: every sample exactly once over all ranks."""
        return self._batches(self.dataset(train=False), self.settings.eval_batch_size, train=False)

    def _batches(self, data: Any, size: int, *, train: bool) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Share:
    """One rank's share of the samples of an epoch.

    Training divides each epoch's permutation into global batches and drops an incomplete last one, so that all ranks
    take the same number of batches of the same size. Evaluation uses every sample once; all ranks take the same number
    of batches (sharded models need that), whose sizes may differ by one.
    Raises DataError: there are fewer samples than one global batch, or than ranks for evaluation.
    """

    total: int
    batch_size: int
    place: ArrayPlace
    train: bool

    def __post_init__(self) -> None:
        least = self.batch_size * self.place.world_size if self.train else self.place.world_size
        if self.total < least:
            kind = "one global training batch" if self.train else "one evaluation sample for every rank"
            raise DataError(f"the data has {self.total} samples, but {kind} needs {least}; use a smaller batch size")

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over all ranks."""
        step = self.batch_size * self.place.world_size
        return self.total // step * step if self.train else self.total

    @property
    def num_batches(self) -> int:
        """Batches of one epoch on each rank."""
        smallest, rest = divmod(self.total, self.place.world_size)
        if self.train:
            return smallest // self.batch_size
        return min(smallest, -(-(smallest + bool(rest)) // self.batch_size))

    def train_slices(self, skip: int = 0) -> Iterator[slice]:
        """Yield this rank's batches, from batch ``skip`` on, as slices of the epoch's permutation."""
        place, size = self.place, self.batch_size
        for batch in range(skip, self.num_batches):
            start = (batch * place.world_size + place.rank) * size
            yield slice(start, start + size)

    def indices(self, permutation: Callable[[int, int], Permutation], epoch: int, skip: int = 0) -> Iterator[Indices]:
        """Yield the sample indices of this rank's batches, from batch ``skip`` on, in training in an epoch's order."""
        place = self.place
        if self.train:
            order = permutation(seed_of(place.shared_seed, epoch), self.total)[: self.num_samples]
            own = order.reshape(self.num_batches, place.world_size, self.batch_size)[skip:, place.rank].copy()
            del order
            yield from (batch.astype(np.int64) for batch in own)
        else:
            parts = np.array_split(np.arange(place.rank, self.total, place.world_size), self.num_batches)
            yield from islice(parts, skip, None)


def permutation(seed: int, count: int) -> Permutation:
    """Return the numbers below ``count`` in an order that follows from ``seed``."""
    order: Any = np.arange(count, dtype=np.int32 if count <= MOST_INT32 else np.int64)
    np.random.default_rng(seed).shuffle(order)
    chosen: Permutation = order
    return chosen


class WholeBatches(Generic[T, R]):
    """A rank's batches, cut from arrays that hold the whole data set with the samples along the first dimension.

    ``augment`` changes each training batch; its generator follows from seed, epoch, rank and batch.
    """

    permutation: ClassVar[staticmethod[[int, int], Permutation]] = staticmethod(permutation)
    generator: ClassVar[staticmethod[[int], Any]] = staticmethod(np.random.default_rng)

    def __init__(
        self,
        data: Mapping[str, T],
        batch_size: int,
        place: ArrayPlace,
        *,
        train: bool,
        augment: Callable[[dict[str, T], R], dict[str, T]] | None = None,
    ) -> None:
        sizes = {name: len(array) for name, array in data.items()}  # type: ignore[arg-type]
        if len(set(sizes.values())) != 1:
            raise DataError(f"the parts of the data hold different numbers of samples: {sizes}")
        self._data, self._augment = dict(data), augment
        self._share = Share(next(iter(sizes.values())), batch_size, place, train)
        self.num_samples = self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[dict[str, T]]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        place = self._share.place
        for position, indices in enumerate(self._share.indices(self.permutation, number, skip), skip):
            batch = self.chosen(indices)
            if self._augment is not None:
                batch = self._augment(batch, self.generator(seed_of(place.shared_seed, number, place.rank, position)))
            yield batch

    def chosen(self, indices: Indices) -> dict[str, T]:
        """Return the samples with these indices."""
        data: Mapping[str, Any] = self._data
        return {name: array[indices] for name, array in data.items()}


_STEPS_IN_EPOCH: Final = 100
"""Optimizer steps in an epoch of synthetic data where the settings bound neither steps nor samples."""


class SyntheticBatches(Generic[T]):
    """One synthetic batch, repeated, for measuring speed only; an epoch suffices for a bound on steps or samples."""

    def __init__(self, batch: T, settings: TrainSettings, world_size: int) -> None:
        self._batch = batch
        end, samples_per_step = settings.end, settings.batch_size * settings.gradient_accumulation_steps * world_size
        steps = _STEPS_IN_EPOCH
        if end.max_steps is not None:
            steps = end.max_steps
        elif end.max_samples is not None:
            steps = max(1, -(-end.max_samples // samples_per_step))
        self._num_batches = steps * settings.gradient_accumulation_steps
        self.num_samples = self._num_batches * settings.batch_size * world_size

    def epoch(self, number: int, skip: int = 0) -> Iterator[T]:
        """Yield the batch repeatedly."""
        for _ in range(skip, self._num_batches):
            yield self._batch


EVALUATION_EPOCH: Final = -1
"""Epoch number for evaluation samples, so that they are the same at every evaluation."""


class BadSamples:
    """Training samples that cannot be read; at most ``limit`` are replaced, each by the next readable sample."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._errors: dict[int, str] = {}
        self._unlogged: list[str] = []

    def read(self, read: Callable[[int], T], index: int, total: int) -> tuple[T, dict[int, str]]:
        """Return sample ``index`` of ``total`` or its replacement, with the errors of the replaced samples."""
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
        """Note the errors of replaced samples; raises DataError for more than ``limit`` samples."""
        new = {number: error for number, error in errors.items() if number not in self._errors}
        self._errors |= new
        self._unlogged += new.values()
        if len(self._errors) > self._limit:
            names = "\n  ".join(self._errors.values())
            allowed = f"--tolerate-bad-samples allows {self._limit} on each rank"
            raise DataError(f"{len(self._errors)} training samples cannot be read; {allowed}:\n  {names}")

    def logged(self, batches: Iterable[T], log: EventLog) -> Iterator[T]:
        """Yield the batches, and log each sample that was replaced, before the batch that it was for."""
        for batch in batches:
            for error in self._unlogged:
                log.event(Event.BAD_SAMPLE, {"message": error})
            self._unlogged.clear()
            yield batch


def log_bad_samples(batches: Iterator[T], source: object, log: EventLog) -> Iterator[T]:
    """Return the batches of ``source``, which are logged by :class:`BadSamples` where it reads sample by sample."""
    bad = getattr(source, "bad_samples", None)
    return bad.logged(batches, log) if isinstance(bad, BadSamples) else batches


def steps_of(batches: Iterator[T], accumulation: int) -> Iterator[list[T]]:
    """Group batches by optimizer step; an incomplete last group is dropped."""
    while len(group := list(islice(batches, accumulation))) == accumulation:
        yield group


class ArraySource(Protocol):
    """A data set that is read one sample at a time."""

    def __len__(self) -> int: ...

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return sample ``index``; ``random`` is seeded by seed, epoch and index."""


class SampleBatches:
    """A rank's batches of an :class:`ArraySource`; each of ``loader.num_workers`` threads reads ``prefetch`` ahead."""

    def __init__(
        self, source: ArraySource, batch_size: int, place: ArrayPlace, loader: LoaderSettings, *, train: bool
    ) -> None:
        self._source, self._loader = source, loader
        self._share = Share(len(source), batch_size, place, train)
        self.num_samples = self._share.num_samples
        self.bad_samples = BadSamples(loader.tolerate_bad_samples if train else 0)

    def epoch(self, number: int, skip: int = 0) -> Iterator[Arrays]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        indices = self._share.indices(permutation, number, skip)
        read = partial(self._read, number if self._share.train else EVALUATION_EPOCH)
        for batch, errors in read_ahead(read, indices, self._loader):
            self.bad_samples.add(errors)
            yield batch

    def _read(self, epoch: int, indices: Indices) -> tuple[Arrays, dict[int, str]]:
        def read(index: int) -> Arrays:
            return self._source.read(index, np.random.default_rng(seed_of(self._share.place.shared_seed, epoch, index)))

        samples, errors = zip_strict(
            *(self.bad_samples.read(read, index, len(self._source)) for index in indices.tolist())
        )
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch, {number: error for part in errors for number, error in part.items()}


def read_ahead(read: Callable[[Any], T], items: Iterator[Any], loader: LoaderSettings) -> Iterator[T]:
    """Yield ``read`` of each item in order; ``num_workers`` threads read ``prefetch`` items ahead each."""
    if not loader.num_workers:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(max_workers=loader.num_workers, thread_name_prefix="samples") as pool:
        ahead = islice(items, loader.num_workers * loader.prefetch)
        pending: deque[Future[T]] = deque(pool.submit(read, item) for item in ahead)
        try:
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(read, item) for item in islice(items, 1))
                yield batch
        finally:
            for future in pending:
                future.cancel()
