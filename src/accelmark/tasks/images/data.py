"""Labelled images: class folders or shards, read with Pillow (without torchvision)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from accelmark.datasets.images import labelled_images
from accelmark.train.batches import Arrays

MEAN: Final = (0.485, 0.456, 0.406)
"""Mean of each channel over the training images, for values from 0 to 1; as published by torchvision."""
STD: Final = (0.229, 0.224, 0.225)
"""Standard deviation of each channel, from the same source."""
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
"""Mean of each channel for values from 0 to 1, as published with CLIP."""
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of each channel, from the same source."""
_AREA: Final = (0.08, 1.0)
_RATIO: Final = (3 / 4, 4 / 3)
_TRIES: Final = 10
MOST_NUMBERS: Final = 2 * _TRIES + 3
"""Most random numbers of a training sample: two for each try of a box, two for its place, one for the flip."""
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
Uniform = Callable[[], float]
"""Returns a random number from 0 to 1, without 1."""


class FolderImages:
    """The images of one split: random resized crops (Szegedy et al. 2015, arXiv:1409.4842), flipped, or centre crops.

    With ``draft``, training JPEGs are decoded at the smallest scale (1/2, 1/4 or 1/8) that still covers the crop's
    pixels, which is faster and changes them.
    """

    def __init__(
        self, directory: Path, split: str, *, num_classes: int, size: int, train: bool, draft: bool = False
    ) -> None:
        self._images = labelled_images(directory / split, num_classes)
        self._size, self._train, self._draft = size, train, draft and train

    def __len__(self) -> int:
        return len(self._images)

    def sample(self, index: int, uniform: Uniform, alter: Callable[[Image.Image], Image.Image] | None = None) -> Arrays:
        """Return ``image``, uint8 of shape (3, size, size), and ``label``; ``alter`` changes a crop of training."""
        with self._images.opened(index) as file:
            box = _random_box(file.size, uniform) if self._train else centre_box(file.size)
            if self._draft:
                box = _drafted(file, box, self._size)
            decoded = file if file.mode == "RGB" else file.convert("RGB")  # which copies in any case
            image = decoded.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        if self._train and uniform() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if alter is not None:
            image = alter(image)
        return {
            "image": np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)),
            "label": np.array(self._images.labels[index]),
        }


class ArrayImages(FolderImages):
    """Images as NumPy arrays; see :class:`accelmark.train.batches.ArraySource`."""

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return sample ``index``."""
        return self.sample(index, random.random)


def _drafted(file: Image.Image, box: Box, size: int) -> Box:
    """Let the decoder scale the image down as far as ``box`` keeps ``size`` pixels; returns the box at that scale."""
    left, top, right, bottom = box
    width, height = file.size
    scale = next((each for each in (8, 4, 2) if min(right - left, bottom - top) >= each * size), 1)
    file.draft(file.mode, (width // scale, height // scale))
    across, down = file.size[0] / width, file.size[1] / height
    return left * across, top * down, right * across, bottom * down


def _random_box(size: tuple[int, int], uniform: Uniform) -> Box:
    def between(low: float, high: float) -> float:
        return low + (high - low) * uniform()

    width, height = size
    for _ in range(_TRIES):
        area = width * height * between(*_AREA)
        ratio = math.exp(between(math.log(_RATIO[0]), math.log(_RATIO[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = math.floor(between(0, width - crop_width + 1))
            top = math.floor(between(0, height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    return centre_box(size)


def centre_box(size: tuple[int, int]) -> Box:
    """Return the centre square (left, top, right, bottom) with 224/256 of the shorter side."""
    width, height = size
    side = min(size) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
