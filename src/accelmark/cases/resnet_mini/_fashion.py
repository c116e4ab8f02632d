"""Fashion-MNIST's images and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from accelmark.datasets.images import read_idx
from accelmark.spec.errors import DataError

MEAN: Final = 0.2860 * 255
"""Mean of the training images' pixel values."""
STD: Final = 0.3530 * 255
"""Standard deviation of the training images' pixel values."""
SIDE: Final = 28
NUM_CLASSES: Final = 10
_Bytes = npt.NDArray[np.uint8]


def read_split(directory: Path, split: Literal["train", "test"]) -> tuple[_Bytes, npt.NDArray[np.int64]]:
    """Return the images, uint8 of shape (samples, 1, 28, 28), and the labels, int64 of shape (samples,).

    Raises DataError: a file is missing, damaged, or has other content.
    """
    prefix = "train" if split == "train" else "t10k"
    images = read_idx(directory, f"{prefix}-images-idx3-ubyte", 3)
    labels = read_idx(directory, f"{prefix}-labels-idx1-ubyte", 1)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels):
        raise DataError(f"{directory}: expected images of {SIDE} x {SIDE} with a label each, found {images.shape}")
    return images[:, None].copy(), labels.astype(np.int64)


def flip(images: _Bytes, random: np.random.Generator) -> _Bytes:
    """Flip half of a batch's images horizontally."""
    chosen = random.random(len(images)) < 0.5
    return np.where(chosen[:, None, None, None], images[..., ::-1], images)
