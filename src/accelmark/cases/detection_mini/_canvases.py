"""Items of Fashion-MNIST on canvases, with the exact box and pixels of each item."""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt
from PIL import Image

from accelmark.cases.resnet_mini._fashion import NUM_CLASSES, SIDE, read_split
from accelmark.frameworks.pytorch.batches import TaskFamily
from accelmark.tasks.detection.pytorch import Scene, overlaps
from accelmark.tasks.segmentation.pytorch import Segments

_SCALES: Final = (0.6, 1.4)
_LARGEST_OVERLAP: Final = 0.05
_TRIES: Final = 20
_DARKEST: Final = 16
"""Pixels below this value do not belong to an item."""
BACKGROUND: Final = NUM_CLASSES + 1
"""Class of the pixels outside items; classes of items start at 1."""


@final
class Canvases:
    """Canvases of ``side`` x ``side`` pixels with one to ``most`` items each, the same in every run.

    Size and place of an item are random; the brighter pixel wins where two touch. Boxes overlap by an intersection over
    union of at most 0.05.
    """

    def __init__(
        self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], count: int, *, side: int, most: int
    ) -> None:
        self._images, self._labels, self._count, self._side, self._most = images, labels, count, side, most

    @classmethod
    def of(cls, case: TaskFamily, *, train: bool) -> Canvases:
        """Return the canvases of a case: of training images, or of test images."""
        items = read_split(case.data_dirs["fashion_mnist"], "train" if train else "test")
        count = case.number("train_images" if train else "eval_images")
        return cls(*items, count, side=case.number("image_size"), most=case.number("most_items"))

    def __len__(self) -> int:
        return self._count

    def scene(self, index: int) -> Scene:
        """Return canvas ``index`` with its boxes."""
        return self._composed(index)[0]

    def pair(self, index: int) -> tuple[Image.Image, Segments]:
        """Return canvas ``index`` with the class of each pixel, from 1."""
        scene, segments = self._composed(index)
        return scene.image, segments

    def _composed(self, index: int) -> tuple[Scene, Segments]:
        random = np.random.default_rng(index)
        canvas = np.zeros((self._side, self._side), np.uint8)
        segments = np.full_like(canvas, BACKGROUND)
        boxes = np.zeros((0, 4))
        labels: list[int] = []
        for _ in range(int(random.integers(1, self._most + 1))):
            item = int(random.integers(len(self._images)))
            size = round(SIDE * random.uniform(*_SCALES))
            image = Image.fromarray(self._images[item, 0]).resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
            down, across = np.nonzero(pixels >= _DARKEST)
            inside = np.array([across.min(), down.min(), across.max() + 1, down.max() + 1])
            for _ in range(_TRIES):
                left, top = random.integers(0, self._side - size + 1, 2)
                box = inside + np.array([left, top, left, top])
                if overlaps(boxes, box).max(initial=0) <= _LARGEST_OVERLAP:
                    part = np.s_[top : top + size, left : left + size]
                    segments[part][pixels >= np.maximum(canvas[part], _DARKEST)] = self._labels[item] + 1
                    np.maximum(canvas[part], pixels, out=canvas[part])
                    boxes, labels = np.concatenate([boxes, box[None]]), [*labels, int(self._labels[item])]
                    break
        image = Image.fromarray(canvas).convert("RGB")
        return Scene(image, boxes, np.array(labels, np.int64), np.zeros(len(labels), np.int64)), segments
