"""Memory that the rank and an engine's process share, and the layout of tensors in it: aligned, in slots."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from accelmark.spec.backports import zip_strict

_ALIGNMENT = 64
"""Bytes."""
Rows = tuple[tuple[str, tuple[int, ...]], ...]
"""Element type and shape of an item, for each tensor of a batch."""


def mapped(descriptor: int) -> Tensor:
    """Return all bytes of the file, mapped."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


def rows_of(batch: Sequence[Tensor]) -> Rows:
    """Return the element type and the shape of an item of each tensor."""
    return tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for tensor in batch)


@final
@dataclass(frozen=True)
class Slots:
    """``num_slots`` slots of up to ``slot_items`` items; a slot has an aligned region for each tensor of a batch."""

    rows: Rows
    slot_items: int
    num_slots: int

    def item_bytes(self) -> list[int]:
        """Return the bytes of an item, for each tensor."""
        return [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in self.rows]

    def _regions(self) -> list[int]:
        return [-(-self.slot_items * each // _ALIGNMENT) * _ALIGNMENT for each in self.item_bytes()]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(self._regions())

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def views(self, memory: Tensor, slot: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of a slot as tensors."""
        return [each[0] for each in self.blocks(memory, slot, 1, items)]

    def blocks(self, memory: Tensor, slot: int, num_slots: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of each of the slots from ``slot`` on, as tensors (slots, items, ...)."""
        tensors: list[Tensor] = []
        regions = self._regions()
        begin = memory.storage_offset() + slot * sum(regions)
        for (dtype, shape), size, region in zip_strict(self.rows, self.item_bytes(), regions):
            rows = memory.as_strided((num_slots, items * size), (sum(regions), 1), begin)
            tensors.append(rows.view(getattr(torch, dtype)).view(num_slots, items, *shape))
            begin += region
        return tensors
