"""Shared memory in which worker processes of a loader pass their batches on, used again for later batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MOST_PARTS: Final = 64
"""Of the memory of a worker; with more batches in use, further ones are passed on in memory of their own."""
_FREE, _SENT, _HELD = 0, 1, 2
_ALIGNMENT: Final = 64
_reference: Any = StorageWeakRef  # which is untyped, as is share_memory_


@final
@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch in a part of the memory of a worker."""

    part: tuple[int, int]
    """Numbers of the worker and of the part."""
    content: Tensor
    """All of the part, as bytes."""
    places: tuple[tuple[str, torch.dtype, torch.Size, int], ...]
    """Name, type, shape and first byte of each tensor."""


@final
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
        if epoch != self._epoch:  # the loader dropped what was sent in an epoch that was not read to its end
            states[states == _SENT] = _FREE
            self._epoch = epoch
        places, end = [], 0
        for name, tensor in batch.items():
            places.append((name, tensor.dtype, tensor.shape, end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if (number := self._part(states.tolist(), end)) is None:
            return batch
        stored = StoredBatch((worker, number), self._parts[number], tuple(places))
        for view, tensor in zip(_views(stored).values(), batch.values(), strict=True):
            view.copy_(tensor)
        states[number] = _SENT
        return stored

    def _part(self, states: list[int], size: int) -> int | None:
        """Return the number of a free part of at least ``size`` bytes, which is made where there is none."""
        free = [number for number in range(len(self._parts)) if states[number] == _FREE]
        if large := [number for number in free if len(self._parts[number]) >= size]:
            return large[0]
        new = _shared(torch.empty(size, dtype=torch.uint8))
        if free:
            self._parts[free[0]] = new
            return free[0]
        if len(self._parts) == _MOST_PARTS:
            return None
        self._parts.append(new)
        return len(self._parts) - 1

    def read(self, found: Mapping[str, Tensor] | StoredBatch) -> Mapping[str, Tensor]:
        """Return a batch that a worker stored; its tensors are not written again while any of them is in use."""
        kept = []
        for reference, part in self._held:
            if reference.expired():
                self._states[part] = _FREE
            else:
                kept.append((reference, part))
        self._held = kept
        if not isinstance(found, StoredBatch):
            return found
        self._states[found.part] = _HELD
        self._held.append((_reference(found.content.untyped_storage()), found.part))
        return _views(found)


def _shared(tensor: Any) -> Tensor:
    moved: Tensor = tensor.share_memory_()
    return moved


def _views(stored: StoredBatch) -> dict[str, Tensor]:
    return {
        name: stored.content[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, dtype, shape, begin in stored.places
    }
