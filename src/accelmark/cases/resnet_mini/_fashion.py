"""Read Fashion-MNIST's files: IDX arrays, gzipped or plain."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError

MEAN: Final = 0.2860 * 255
"""Mean of the training images' pixel values."""
STD: Final = 0.3530 * 255
"""Standard deviation of the training images' pixel values."""
SIDE: Final = 28
NUM_CLASSES: Final = 10
_Bytes = npt.NDArray[np.uint8]
_PREFIX: Final = {"train": "train", "test": "t10k"}
_UINT8: Final = 8


def read_split(directory: Path, split: Literal["train", "test"]) -> tuple[_Bytes, npt.NDArray[np.int64]]:
    """Return the images, uint8 of shape (samples, 1, 28, 28), and the labels, int64 of shape (samples,).

    Raises DataError: a file is missing, damaged, or has other content.
    """
    prefix = _PREFIX[split]
    images = _read_idx(directory, f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(directory, f"{prefix}-labels-idx1-ubyte", dimensions=1)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels):
        raise DataError(f"{directory}: expected images of {SIDE} x {SIDE} with a label each, found {images.shape}")
    return images[:, None], labels.astype(np.int64)


def flip(images: _Bytes, random: np.random.Generator) -> _Bytes:
    """Flip half of a batch's images horizontally."""
    chosen = random.random(len(images)) < 0.5
    return np.where(chosen[:, None, None, None], images[..., ::-1], images)


def _read_idx(directory: Path, name: str, *, dimensions: int) -> _Bytes:
    packed, plain = directory / f"{name}.gz", directory / name
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{directory}: expected {name}.gz or {name} here, found neither") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{packed}: cannot be unpacked: {error}") from error
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes((0, 0, _UINT8, dimensions)):
        raise DataError(f"{directory / name}: is not an IDX file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(raw, ">i4", count=dimensions, offset=4)
    if len(raw) - header != shape.prod():
        raise DataError(f"{directory / name}: says {tuple(shape.tolist())}, but holds {len(raw) - header} values")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()
