"""Batches of a data set, from tensors in memory or from samples read one by one, and their way to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final, Protocol, TypeVar, Union

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accelmark.frameworks.pytorch.case import Batch, Batches, Place, TrainCase
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError
from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.batches import (
    EVALUATION_EPOCH,
    MOST_INT32,
    ArraySource,
    BadSamples,
    DataSetCase,
    Indices,
    Permutation,
    Share,
    WholeBatches,
    seed_of,
)

_MOST_PARTS: Final = 64
"""Of the memory of a worker; with more batches in use, further ones are passed on in memory of their own."""
_FREE, _SENT, _HELD = 0, 1, 2
_ALIGNMENT: Final = 64
_reference: Any = StorageWeakRef  # which is untyped, as is share_memory_


@dataclass(frozen=True)
class StoredBatch:
    """A batch in a part of the memory of a worker."""

    part: tuple[int, int]
    """Numbers of the worker and of the part."""
    content: Tensor
    """All of the part, as bytes."""
    places: tuple[tuple[str, torch.dtype, torch.Size, int], ...]
    """Name, type, shape and first byte of each tensor."""


class BatchMemory:
    """Shared memory of the workers of a loader; a part is used again when the reading process has freed its batch.

    The kernel clears each page of new shared memory when it is first written, which takes longer than all other copies
    of a batch together (benchmarks/loaders.md). The workers have copies of this object with the same ``_states``.
    """

    def __init__(self, num_workers: int) -> None:
        states = torch.zeros(num_workers, _MOST_PARTS, dtype=torch.uint8)
        self._states = _shared(states) if num_workers else states
        self._parts: list[Tensor] = []
        self._held: list[tuple[Any, tuple[int, int]]] = []
        self._epoch: int | None = None

    def stored(self, batch: Mapping[str, Tensor], worker: int, epoch: int) -> Mapping[str, Tensor] | StoredBatch:
        """Return the batch in a part of the memory, or as it is where none is free; called by a worker."""
        states = self._states[worker]
        if epoch != self._epoch:  # the loader dropped the batches of an epoch that was not read to its end
            states[states == _SENT] = _FREE
            self._epoch = epoch
        places, end = [], 0
        for name, tensor in batch.items():
            places.append((name, tensor.dtype, tensor.shape, end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        free = [number for number, state in enumerate(states[: len(self._parts)].tolist()) if state == _FREE]
        large = [number for number in free if len(self._parts[number]) >= end]
        if not large and not free and len(self._parts) == _MOST_PARTS:
            return batch
        number = large[0] if large else free[0] if free else len(self._parts)
        if not large:
            self._parts[number : number + 1] = [_shared(torch.empty(end, dtype=torch.uint8))]
        stored = StoredBatch((worker, number), self._parts[number], tuple(places))
        for view, tensor in zip_strict(_views(stored).values(), batch.values()):
            view.copy_(tensor)
        states[number] = _SENT
        return stored

    def read(self, batch: Mapping[str, Tensor] | StoredBatch) -> Mapping[str, Tensor]:
        """Return a batch that a worker stored; its tensors are not written again while any of them is in use."""
        kept = []
        for reference, part in self._held:
            if reference.expired():
                self._states[part] = _FREE
            else:
                kept.append((reference, part))
        self._held = kept
        if not isinstance(batch, StoredBatch):
            return batch
        self._states[batch.part] = _HELD
        self._held.append((_reference(batch.content.untyped_storage()), batch.part))
        return _views(batch)


def _shared(tensor: Any) -> Tensor:
    moved: Tensor = tensor.share_memory_()
    return moved


def _views(stored: StoredBatch) -> dict[str, Tensor]:
    return {
        name: stored.content[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, dtype, shape, begin in stored.places
    }


_Found = Union[tuple[Union[Batch, StoredBatch], dict[int, str]], DataError]
"""A batch with the errors of replaced samples, or the error of a sample that was not replaced."""
Augment = Callable[[dict[str, Tensor], torch.Generator], dict[str, Tensor]]
"""Augments a training batch, with random numbers from the generator only."""


def generator_for_seed(seed: int) -> torch.Generator:
    """Return a random generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def generator_for(*parts: int) -> torch.Generator:
    """Return a random generator that depends on the numbers in ``parts`` (seed, epoch, sample) only."""
    return generator_for_seed(seed_of(*parts))


def permutation(seed: int, count: int) -> Permutation:
    """Return the numbers below ``count`` in an order that follows from ``seed``, other than NumPy's."""
    dtype = torch.int32 if count <= MOST_INT32 else torch.int64
    order: Permutation = torch.randperm(count, generator=generator_for_seed(seed), dtype=dtype).numpy()
    return order


class TensorBatches(WholeBatches[Tensor, torch.Generator]):
    """Batches cut from tensors, on the CPU or on the device."""

    permutation, generator = staticmethod(permutation), staticmethod(generator_for_seed)

    def chosen(self, indices: Indices) -> dict[str, Tensor]:
        chosen = torch.from_numpy(indices)
        return {name: tensor[chosen.to(tensor.device)] for name, tensor in self._data.items()}


class SampleSource(Protocol):
    """A data set that is read one sample at a time, in the loader's worker processes if there are any."""

    def __len__(self) -> int: ...

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return sample ``index``; ``random`` is seeded by seed, epoch and index."""


class ReadSamples:
    """A source of ``count`` samples that a function reads by index and generator, as :meth:`SampleSource.read`."""

    def __init__(self, count: int, read: Callable[[int, torch.Generator], Mapping[str, Tensor]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return sample ``index``."""
        return self._read(index, random)


class FromArrays(ReadSamples):
    """A source of NumPy arrays as a source of tensors, with NumPy's random numbers for a generator's seed."""

    def __init__(self, source: ArraySource) -> None:
        def read(index: int, random: torch.Generator) -> Mapping[str, Tensor]:
            arrays = source.read(index, np.random.default_rng(random.initial_seed()))
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

        super().__init__(len(source), read)


class IndexedBatches:
    """Batches of a :class:`SampleSource`, read ahead by ``loader.num_workers`` processes (0: by this one)."""

    def __init__(
        self,
        source: SampleSource,
        batch_size: int,
        place: Place,
        loader: LoaderSettings,
        *,
        train: bool,
        augment: Augment | None = None,
    ) -> None:
        self._train = train
        self.bad_samples = BadSamples(loader.tolerate_bad_samples if train else 0)
        share = Share(len(source), batch_size, place, train)
        self.num_samples = share.num_samples
        self._order = _Order(share)
        workers: dict[str, Any] = {}
        if loader.num_workers:
            # Forked: a source may hold functions and mapped files, which Python 3.14 would copy to each worker.
            workers = {"prefetch_factor": loader.prefetch, "persistent_workers": train}
            workers["multiprocessing_context"] = "fork"
        self._samples = _Samples(source, place.shared_seed, augment, self.bad_samples)
        self._loader: DataLoader[_Found] = DataLoader(
            self._samples,
            batch_sampler=self._order,
            collate_fn=lambda batch: batch,
            num_workers=loader.num_workers,
            generator=torch.Generator(),  # else each epoch would draw from the random numbers of dropout
            **workers,
        )

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's batches of epoch ``number``, from batch ``skip`` on."""
        self._order.epoch, self._order.skip = number if self._train else EVALUATION_EPOCH, skip
        if self._samples.memory is None or not self._train:  # whose workers are new in each evaluation
            self._samples.memory = BatchMemory(self._loader.num_workers)
        memory = self._samples.memory
        for loaded in self._loader:
            if isinstance(loaded, DataError):
                raise loaded
            batch, errors = loaded
            self.bad_samples.add(errors)
            yield memory.read(batch)


class _Order:
    """The loader's batch sampler; yields (epoch, index) pairs."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.epoch = 0
        self.skip = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for indices in self._share.indices(permutation, epoch, self.skip):
            yield [(epoch, index) for index in indices.tolist()]


class _Samples(Dataset[Any]):
    """Reads whole batches, which a loader asks for by ``__getitems__``."""

    def __init__(self, source: SampleSource, seed: int, augment: Augment | None, bad: BadSamples) -> None:
        self._source, self._seed, self._augment, self._bad = source, seed, augment, bad
        self.memory: BatchMemory | None = None

    def __getitems__(self, items: list[tuple[int, int]]) -> _Found:
        replaced: dict[int, str] = {}

        def read(epoch: int, number: int) -> Mapping[str, Tensor]:
            return self._source.read(number, generator_for(self._seed, epoch, number))

        def samples() -> Iterator[Mapping[str, Tensor]]:
            for epoch, index in items:
                sample, errors = self._bad.read(partial(read, epoch), index, len(self._source))
                replaced.update(errors)
                yield sample

        try:
            batch = collated(samples(), len(items))
        except DataError as error:
            return error  # the loader would put the worker's traceback into its message
        if self._augment is not None:
            batch = self._augment(batch, generator_for(self._seed, *items[0], 1))
        worker = get_worker_info()
        if worker is None or self.memory is None:
            return batch, replaced
        return self.memory.stored(batch, worker.id, items[0][0]), replaced


def collated(samples: Iterable[Mapping[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Return ``count`` samples as one batch; tensors of different sizes are filled up with zeros at their ends."""
    batch: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        for name, part in sample.items():
            if not number:
                batch[name] = part.new_empty(count, *part.shape)
            rows = batch[name]
            if part.shape == rows.shape[1:]:
                rows[number] = part
            else:
                sizes = [max(pair) for pair in zip_strict(rows.shape[1:], part.shape)]
                if sizes != list(rows.shape[1:]):
                    smaller, rows = rows, rows.new_zeros(count, *sizes)
                    rows[(slice(number), *map(slice, smaller.shape[1:]))] = smaller[:number]
                    batch[name] = rows
                rows[number] = 0
                rows[number][tuple(map(slice, part.shape))] = part
    return batch


class TaskFamily(DataSetCase, TrainCase):
    """A case with a data set of whole tensors by name, or of a :class:`SampleSource`."""

    def _batches(self, data: Mapping[str, Tensor] | SampleSource, size: int, *, train: bool) -> Batches:
        augment = self.augment if train else None
        if isinstance(data, Mapping):
            return TensorBatches(data, size, self.place, train=train, augment=augment)
        return IndexedBatches(data, size, self.place, self.settings.loader, train=train, augment=augment)


T = TypeVar("T")


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """Return a function that copies a batch to ``device`` without waiting, images optionally in channels-last order."""
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(batch: Batch) -> Batch:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if not channels_last:
            return moved
        return {
            name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
            for name, tensor in moved.items()
        }

    return move


def pinned(batch: Batch) -> Batch:
    """Return the batch in page-locked memory, from which copies are asynchronous."""
    return {name: tensor if tensor.device.type != "cpu" else tensor.pin_memory() for name, tensor in batch.items()}


class CopyStream:
    """A stream on which batches are made and copied to a device while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def send(self, batches: Iterator[Batch], move: Callable[[Batch], Batch]) -> Iterator[tuple[Batch, torch.Event]]:
        """Yield moved batches, each with the event of its arrival; runs in a thread of its own."""
        # A data set on the device may still be on its way there.
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            for batch in batches:
                yield move(batch), self._stream.record_event()

    def receive(self, sent: Iterator[tuple[Batch, torch.Event]]) -> Iterator[Batch]:
        """Yield batches that the device may use: its current stream waits for their arrival."""
        for batch, arrived in sent:
            current = torch.accelerator.current_stream(self._stream.device)
            current.wait_event(arrived)
            for tensor in batch.values():
                tensor.record_stream(current)
            yield batch


def fetched_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield ``items``, which a thread makes up to ``depth`` ahead; closing it discards the others."""
    with ThreadPoolExecutor(1, "batches") as pool:
        pending = deque(pool.submit(next, items, None) for _ in range(depth))
        try:
            while (item := pending.popleft().result()) is not None:
                pending.append(pool.submit(next, items, None))
                yield item
        finally:
            for future in pending:
                future.cancel()
            if isinstance(items, Generator):
                pool.submit(items.close)  # in its thread, whose stream it may have set


def on_meta(batch: Batch) -> Batch:
    """Return a batch of the same shapes and types without data."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
