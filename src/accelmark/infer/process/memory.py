"""Anonymous shared memory of the rank and the engine's process, and the layout of tensors in it."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; compiled kernels assume aligned inputs."""


def create_memory() -> int:
    """Return the descriptor of an empty file in memory without a name: nothing to clean up, no limit of /dev/shm."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("accelmark")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int) -> Tensor:
    """Return all bytes of the file, mapped."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


@final
@dataclass(frozen=True, slots=True)
class Slots:
    """``num_slots`` slots of up to ``slot_items`` items; a slot has one region for each tensor of a batch."""

    rows: tuple[tuple[str, tuple[int, ...]], ...]
    """Element type and shape of an item, for each tensor."""
    slot_items: int
    num_slots: int
    first_byte: int = 0

    @classmethod
    def like(cls, batch: Sequence[Tensor], slot_items: int, num_slots: int, first_byte: int = 0) -> Slots:
        """Return the layout for batches of the item shapes of ``batch``."""
        rows = tuple((str(each.dtype).removeprefix("torch."), tuple(each.shape[1:])) for each in batch)
        return cls(rows, slot_items, num_slots, first_byte)

    @classmethod
    def of(cls, values: Sequence[Any]) -> Slots:
        """Return the layout that :meth:`values` describes."""
        rows, slot_items, num_slots, first_byte = values
        return cls(tuple((dtype, tuple(shape)) for dtype, shape in rows), slot_items, num_slots, first_byte)

    def values(self) -> list[Any]:
        """Return the layout as JSON values."""
        return [self.rows, self.slot_items, self.num_slots, self.first_byte]

    def item_bytes(self) -> list[int]:
        """Return the bytes of an item, for each tensor."""
        return [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in self.rows]

    @property
    def end(self) -> int:
        """Byte after the last slot."""
        return self.first_byte + self.num_slots * sum(self._regions())

    def _regions(self) -> list[int]:
        return [aligned(self.slot_items * each) for each in self.item_bytes()]

    def views(self, memory: Tensor, slot: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of a slot as tensors."""
        return [each[0] for each in self.blocks(memory, slot, 1, items)]

    def blocks(self, memory: Tensor, slot: int, num_slots: int, items: int) -> list[Tensor]:
        """Return the first ``items`` items of each of the slots from ``slot`` on, as tensors (slots, items, ...)."""
        found: list[Tensor] = []
        regions = self._regions()
        begin = self.first_byte + slot * sum(regions)
        for (dtype, shape), size, region in zip(self.rows, self.item_bytes(), regions, strict=True):
            rows = memory.as_strided((num_slots, items * size), (sum(regions), 1), memory.storage_offset() + begin)
            found.append(rows.view(getattr(torch, dtype)).view(num_slots, items, *shape))
            begin += region
        return found


def aligned(size: int) -> int:
    """Return ``size`` rounded up to the alignment of regions."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
