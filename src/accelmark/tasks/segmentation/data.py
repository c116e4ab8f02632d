"""Images with a class for each pixel in the layout of ADE20K's scene parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt
from PIL import Image

from accelmark.datasets.folders import opened_image
from accelmark.spec.errors import DataError
from accelmark.tasks.detection.data import coloured, whole_number
from accelmark.tasks.images.data import Uniform

_MOST_OF_ONE_CLASS: Final = 0.75
_TRIES: Final = 10
Segments = npt.NDArray[np.uint8]
"""Classes from 1; 0: not counted. Of shape (height, width)."""


@final
class SegmentedImages:
    """The images ``images/<split>/*.jpg`` with their classes ``annotations/<split>/*.png``."""

    def __init__(self, directory: Path, split: str, *, num_classes: int) -> None:
        self._images = sorted((directory / "images" / split).glob("*.jpg"))
        self._annotations, self._num_classes = directory / "annotations" / split, num_classes
        if not self._images:
            raise DataError(f"{directory / 'images' / split}: expected *.jpg here, found none")
        present = {path.stem for path in self._annotations.glob("*.png")}
        if missing := next((path for path in self._images if path.stem not in present), None):
            raise DataError(f"{missing}: there is no {self._annotations / missing.stem}.png")

    def __len__(self) -> int:
        return len(self._images)

    def pair(self, index: int) -> tuple[Image.Image, Segments]:
        """Return image and classes; raises DataError where sizes differ or a class is not among ``num_classes``."""
        path = self._images[index]
        with opened_image(path) as file:
            image = file.convert("RGB")
        annotation = self._annotations / f"{path.stem}.png"
        with opened_image(annotation) as file:
            segments = np.array(file)
        if segments.shape != (image.height, image.width) or segments.max(initial=0) > self._num_classes:
            expected = f"expected ({image.height}, {image.width}) as {path.name}, and classes up to {self._num_classes}"
            raise DataError(f"{annotation}: has shape {segments.shape} and classes up to {segments.max()}; {expected}")
        return image, segments


def random_part(image: Image.Image, segments: Segments, uniform: Uniform, size: int) -> tuple[Image.Image, Segments]:
    """Return a square of ``size``, flipped and coloured at random, of the image at 0.5 to 2 times that shorter side.

    The square has at most 75 % of one class, if one of ten has; smaller images are filled up with class 0. As the
    recipes of SegFormer (arXiv:2105.15203, section 4.1) and Mask2Former (arXiv:2112.01527, section 4.3).
    """
    image = at_shorter_side(image, round(size * (0.5 + 1.5 * uniform())))
    segments = np.array(Image.fromarray(segments).resize(image.size, Image.Resampling.NEAREST))
    for _ in range(_TRIES):
        left = whole_number(0, max(0, image.width - size), uniform)
        top = whole_number(0, max(0, image.height - size), uniform)
        part = segments[top : top + size, left : left + size]
        counts = np.bincount(part[part > 0], minlength=2)
        if np.count_nonzero(counts) > 1 and counts.max() < _MOST_OF_ONE_CLASS * counts.sum():
            break
    image = image.crop((left, top, left + size, top + size))  # black beyond the edge
    padded = np.zeros((size, size), np.uint8)
    padded[: part.shape[0], : part.shape[1]] = part
    image = coloured(image, uniform)
    if uniform() < 0.5:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), np.ascontiguousarray(padded[:, ::-1])
    return image, padded


def at_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """Return the image with a shorter side of ``side`` pixels, and a longer one of at most four times as many."""
    scale = min(side / min(image.size), 4 * side / max(image.size))
    width, height = (max(1, round(each * scale)) for each in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)
