"""Latents and encodings of images with captions: WebDataset's shards, and streams of Arrow."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from accelmark.datasets.shards import bytes_at, tar_members
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.train.batches import Arrays

_SUFFIXES: Final = ("npy", "txt")


@final
class CaptionedLatents:
    """The moments of images' latents (means, then logarithms of variances) with captions, read by offset."""

    def __init__(self, directory: Path) -> None:
        self._shards = sorted(directory.glob("*.tar"))
        if not self._shards:
            raise DataError(f"{directory}: expected shards (*.tar) here, found none")
        self._places = np.concatenate([_places(path, number) for number, path in enumerate(self._shards)])

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.float32], str]:
        """Return the moments of sample ``index``, of ``shape``, and its caption."""
        shard, *places = self._places[index].tolist()
        path = self._shards[shard]
        where = f"{path}: sample at byte {places[0]}"
        with raising(DataError, f"{where}: cannot be read", OSError, ValueError):
            with path.open("rb") as file:
                moments, text = (bytes_at(file, *places[start : start + 2]) for start in (0, 2))
            array = np.load(BytesIO(moments), allow_pickle=False)
            caption = text.decode("utf-8").strip()
        if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            found = f"has shape {array.shape} of {array.dtype}"
            raise DataError(f"{where}: {found}; expected finite moments of shape {shape}")
        return array.astype(np.float32), caption


def _places(path: Path, number: int) -> npt.NDArray[np.int64]:
    """Return shard, offset and size of the moments, and offset and size of the caption of each sample."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    for member in tar_members(path):
        key, _, suffix = member.name.rpartition(".")
        if suffix in _SUFFIXES:
            members.setdefault(key, {})[suffix] = member.offset, member.size
    with raising(DataError, f"{path}: a sample lacks its .npy or .txt", KeyError):
        rows = [(number, *parts["npy"], *parts["txt"]) for parts in members.values()]
    return np.array(rows, np.int64).reshape(-1, 5)


@final
class EncodedRows:
    """The rows of all ``*.arrow`` below a directory, memory-mapped; arrays are ``.npy`` files of bf16 as uint16."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]], numbers: tuple[str, ...] = ()) -> None:
        self._paths, self._shapes, self._numbers = sorted(directory.rglob("*.arrow")), shapes, numbers
        if not self._paths:
            raise DataError(f"{directory}: expected rows (*.arrow) here, found none")
        self._tables = [_opened(path) for path in self._paths]
        self._ends = np.cumsum([table.num_rows for table in self._tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Arrays:
        """Return the arrays of row ``index``, uint16, and its whole numbers."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        table, row = self._tables[part], index - (int(self._ends[part - 1]) if part else 0)
        where = f"{self._paths[part]}: row {row}"
        with raising(DataError, f"{where} cannot be read", *UNREADABLE):
            found = {name: np.load(BytesIO(table[name][row].as_py()), allow_pickle=False) for name in self._shapes}
            numbers = {name: np.array(int(table[name][row].as_py())) for name in self._numbers}
        for name, array in found.items():
            if array.shape != self._shapes[name] or array.dtype != np.uint16:
                has = f"{name} has shape {array.shape} of {array.dtype}"
                raise DataError(f"{where}: {has}; expected {self._shapes[name]} of uint16")
        return {**found, **numbers}


def _opened(path: Path) -> Any:
    with raising(DataError, f"{path}: is not a readable stream of Arrow", OSError, pa.ArrowInvalid):
        sys.audit("open", str(path), "r", 0)  # the library opens it itself
        with pa.memory_map(str(path)) as file:  # whose pages stay mapped: thousands of files would stay open
            return pa.ipc.open_stream(file).read_all()
