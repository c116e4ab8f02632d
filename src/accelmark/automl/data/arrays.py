"""Arrays from files, checked once: what cannot be pictures with labels is told here, by file and array."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.data.pictures import ArrayPictures
from accelmark.spec.errors import DataError

_AXES: Final = 4
_MAGIC: Final = (b"PK", b"\x93NUMPY")
"""How .npz and .npy files begin."""


def read_npz(path: Path, what: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of an .npz file, never objects; raises DataError when it is missing, broken or something else."""
    try:
        with path.open("rb") as file:
            magic = file.read(max(map(len, _MAGIC)))
            file.seek(0)
            if not magic.startswith(_MAGIC):  # numpy would take it for a pickle, and say how to load that unsafely
                raise DataError(f"{path}: cannot be read as {what}: it is no .npz file")
            opened = np.load(file, allow_pickle=False)
            if isinstance(opened, np.ndarray):
                raise DataError(f"{path}: cannot be read as {what}: it is one array, an .npz file of named ones is due")
            with opened:
                arrays = {name: opened[name] for name in opened.files}
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as {what}: {error or type(error).__name__}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: cannot be read as {what}: {name} is no array")
    return arrays


def checked_pictures(
    images: NDArray[Any], labels: NDArray[Any], *, images_at: str, labels_at: str, flip: bool = False
) -> ArrayPictures:
    """Return pictures of arrays that are some: bytes of shape (n, channels, height, width), n whole labels from 0.

    ``images_at`` and ``labels_at`` say where they come from. Raises DataError naming what is wrong with which of them.
    """
    if images.ndim != _AXES:
        raise DataError(
            f"{images_at}: has shape {images.shape}; pictures have four axes (number, channels, height, width)"
        )
    if images.dtype != np.uint8:
        raise DataError(f"{images_at}: holds {images.dtype}; pictures are bytes (uint8) from 0 to 255")
    if labels.ndim != 1:
        raise DataError(f"{labels_at}: has shape {labels.shape}; labels have one axis, the class of each picture")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{labels_at}: holds {labels.dtype}; labels are whole numbers, the classes from 0")
    if len(images) != len(labels):
        raise DataError(f"{labels_at}: has {len(labels)} labels, but {images_at} has {len(images)} pictures")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) > np.iinfo(np.int64).max):
        raise DataError(f"{labels_at}: has labels from {labels.min()} to {labels.max()}; classes are counted from 0")
    return ArrayPictures(images, labels.astype(np.int64), flip)
