"""Captioned latents in WebDataset's shards: tar archives with ``<key>.npy`` and ``<key>.txt``."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path
from typing import IO, Final, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError

_SUFFIXES: Final = ("npy", "txt")


@final
class CaptionedLatents:
    """The moments of images' latents (means, then logarithms of variances) with captions, read by offset.

    Raises:
        DataError: there is no shard, one is damaged, or a sample of one lacks its moments or its caption.
    """

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
        try:
            with path.open("rb") as file:
                moments, text = (_bytes_at(file, *places[start : start + 2]) for start in (0, 2))
            array = np.load(BytesIO(moments), allow_pickle=False)
            caption = text.decode("utf-8").strip()
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot be read: {error}") from error
        if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            found = f"has shape {array.shape} of {array.dtype}"
            raise DataError(f"{where}: {found}; expected finite moments of shape {shape}")
        return array.astype(np.float32), caption


def _bytes_at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _places(path: Path, number: int) -> npt.NDArray[np.int64]:
    """Return shard, offset and size of the moments, and offset and size of the caption of each sample."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                key, _, suffix = member.name.rpartition(".")
                if member.isreg() and suffix in _SUFFIXES:
                    found.setdefault(key, {})[suffix] = member.offset_data, member.size
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path}: is not a readable tar archive: {error}") from error
    for key, parts in found.items():
        if missing := [suffix for suffix in _SUFFIXES if suffix not in parts]:
            raise DataError(f"{path}: has no {key}.{missing[0]}")
    rows = [(number, *parts["npy"], *parts["txt"]) for parts in found.values()]
    return np.array(rows, np.int64).reshape(-1, 5)
