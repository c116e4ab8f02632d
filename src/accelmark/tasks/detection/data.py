"""Images with boxes in the layout of COCO, and their augmentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

from accelmark.datasets.folders import opened_image
from accelmark.spec.errors import DataError, raising
from accelmark.tasks.images.data import Uniform

_OVERLAPS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Least overlaps of a box with a crop (Liu et al. 2016, arXiv:1512.02325, section 2.2); 1: no crop."""
_TRIES: Final = 40
T = TypeVar("T")


@final
@dataclass(frozen=True)
class Scene:
    """An image with ``n`` boxes."""

    image: Image.Image
    boxes: npt.NDArray[np.float64]
    """Left, top, right, bottom in pixels, of shape (n, 4)."""
    labels: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.int64]
    """1 where a box contains several objects that are not marked apart, which evaluation ignores."""

    def flipped(self) -> Scene:
        """Return its mirror image."""
        boxes = self.boxes[:, [2, 1, 0, 3]]
        boxes[:, [0, 2]] = self.image.width - boxes[:, [0, 2]]
        return replace(self, image=self.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), boxes=boxes)

    def resized(self, width: int, height: int) -> Scene:
        """Return it with other sizes."""
        across, down = width / self.image.width, height / self.image.height
        image = self.image.resize((width, height), Image.Resampling.BILINEAR)
        return replace(self, image=image, boxes=self.boxes * [across, down, across, down])

    def shorter(self, side: int, longest: int) -> Scene:
        """Return it with a shorter side of ``side`` pixels, or less where the longer one would exceed ``longest``."""
        low, high = sorted(self.image.size)
        scale = min(side / low, longest / high)
        return self.resized(max(1, round(self.image.width * scale)), max(1, round(self.image.height * scale)))

    def cropped(self, left: int, top: int, width: int, height: int) -> Scene:
        """Return a part, with the parts of the boxes inside it; boxes without a pixel in it are left out."""
        boxes = np.clip(self.boxes - [left, top, left, top], 0, [width, height, width, height])
        inside = (boxes[:, 2:] - boxes[:, :2]).min(1, initial=np.inf) >= 1
        image = self.image.crop((left, top, left + width, top + height))
        return Scene(image, boxes[inside], self.labels[inside], self.crowd[inside])


def whole_number(low: int, high: int, uniform: Uniform) -> int:
    """Return a random number from ``low`` to ``high``."""
    return low + int(uniform() * (high - low + 1))


def chosen(values: Sequence[T], uniform: Uniform) -> T:
    """Return one of the values."""
    return values[whole_number(0, len(values) - 1, uniform)]


def multi_scale(scene: Scene, side: int, longest: int, uniform: Uniform) -> Scene:
    """Augment as DETR (Carion et al. 2020, arXiv:2005.12872, section 4): a flip, and one of 11 sizes, cropped or not.

    All sizes are in proportion to the paper's, whose largest shorter side (``side``) has 800 pixels.
    """
    scene = scene.flipped() if uniform() < 0.5 else scene
    sides = [round(side * part / 25) for part in range(15, 26)]
    if uniform() < 0.5:
        scene = scene.shorter(chosen([side * part // 8 for part in (4, 5, 6)], uniform), 10 * side)
        least, most = round(0.48 * side), round(0.75 * side)
        width, height = (whole_number(min(least, each), min(each, most), uniform) for each in scene.image.size)
        left = whole_number(0, scene.image.width - width, uniform)
        top = whole_number(0, scene.image.height - height, uniform)
        scene = scene.cropped(left, top, width, height)
    return scene.shorter(chosen(sides, uniform), longest)


def distorted(scene: Scene, size: int, uniform: Uniform) -> Scene:
    """Augment as RT-DETR (Zhao et al. 2023, arXiv:2304.08069): colours, smaller images, crops, flips; a square."""
    if uniform() < 0.5:
        scene = replace(scene, image=coloured(scene.image, uniform))
    if uniform() < 0.5:
        scene = zoomed_out(scene, uniform)
    if uniform() < 0.8:
        scene = overlapping_crop(scene, uniform)
    if uniform() < 0.5:
        scene = scene.flipped()
    return scene.resized(size, size)


def zoomed_out(scene: Scene, uniform: Uniform) -> Scene:
    """Return the scene somewhere on a black canvas of one to four times its sides."""
    scale = 1 + 3 * uniform()
    width, height = (int(side * scale) for side in scene.image.size)
    left = whole_number(0, width - scene.image.width, uniform)
    top = whole_number(0, height - scene.image.height, uniform)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(scene.image, (left, top))
    return replace(scene, image=canvas, boxes=scene.boxes + np.array([left, top, left, top]))


def overlapping_crop(scene: Scene, uniform: Uniform) -> Scene:
    """Return a crop that a box overlaps by at least a random share, with the boxes whose centre is inside."""
    if not len(scene.boxes) or (least := chosen(_OVERLAPS, uniform)) == 1:
        return scene
    for _ in range(_TRIES):
        width, height = (int(side * (0.3 + 0.7 * uniform())) for side in scene.image.size)
        if not height or not 0.5 < width / height < 2:
            continue
        left = whole_number(0, scene.image.width - width, uniform)
        top = whole_number(0, scene.image.height - height, uniform)
        crop = np.array([left, top, left + width, top + height])
        centres = (scene.boxes[:, :2] + scene.boxes[:, 2:]) / 2
        inside = ((centres > crop[:2]) & (centres < crop[2:])).all(1)
        if inside.any() and overlaps(scene.boxes[inside], crop).max() >= least:
            selected = replace(scene, boxes=scene.boxes[inside], labels=scene.labels[inside], crowd=scene.crowd[inside])
            return selected.cropped(left, top, width, height)
    return scene


def overlaps(boxes: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return intersection over union of each box with another one."""
    shared = np.clip(np.minimum(boxes[:, 2:], other[2:]) - np.maximum(boxes[:, :2], other[:2]), 0, None).prod(1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (other[2:] - other[:2]).prod() - shared
    return shared / union


def coloured(image: Image.Image, uniform: Uniform) -> Image.Image:
    """Return it with other brightness, contrast, saturation and hue, each with probability 0.5."""
    changes = ((ImageEnhance.Brightness, 0.125), (ImageEnhance.Contrast, 0.5), (ImageEnhance.Color, 0.5))
    for enhance, most in changes:
        if uniform() < 0.5:
            image = enhance(image).enhance(1 + most * (2 * uniform() - 1))
    if uniform() < 0.5:
        shift = round(0.05 * (2 * uniform() - 1) * 256)
        hue, saturation, value = image.convert("HSV").split()
        turned = hue.point([(each + shift) % 256 for each in range(256)])
        image = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    return image


_OUTSIDE_PX: Final = 5.0
"""Boxes of COCO reach over the edge by fractions of a pixel, which is cut off; more than this is an error."""


def _without_outlines(values: dict[str, Any]) -> dict[str, Any]:
    values.pop("segmentation", None)
    return values


@final
class BoxedImages:
    """The images of a split with their boxes.

    Training leaves out crowds, boxes without area and images without boxes; evaluation has all of them. A box's label
    is its category's id, or where there are ``num_classes`` categories, the position of its id among them.

    Raises DataError: the annotations cannot be read, have no image or class for a box, or a box lies outside of its
    image.
    """

    def __init__(self, directory: Path, split: str, *, num_classes: int, train: bool) -> None:
        self._folder = directory / split
        self._file = directory / "annotations" / f"instances_{split}.json"
        with raising(DataError, f"{self._file}: is not in COCO's format", OSError, KeyError, TypeError, ValueError):
            # Outlines of objects are dropped while the file is read: of all of COCO's they would take gigabytes.
            content = json.loads(self._file.read_bytes(), object_hook=_without_outlines)
            images = {image["id"]: image for image in content["images"]}
            sizes = {each: (image["width"], image["height"]) for each, image in images.items()}
            labels = self._labels([each["id"] for each in content["categories"]], num_classes)
            rows: dict[int, list[tuple[float, ...]]] = {each: [] for each in images}
            for annotation in content["annotations"]:
                image, (left, top, width, height) = annotation["image_id"], map(float, annotation["bbox"])
                right, bottom, size = left + width, top + height, sizes[image]
                beyond = (-left, -top, right - size[0], bottom - size[1], -width, -height)
                if not all(distance <= _OUTSIDE_PX for distance in beyond):  # which not a number is not
                    what = f"annotation {annotation['id']}: the box {annotation['bbox']} is not inside its image"
                    raise DataError(f"{self._file}: {what} of {size[0]} x {size[1]} pixels")
                is_crowd = bool(annotation.get("iscrowd", 0))
                if not train or (not is_crowd and right > left and bottom > top):
                    rows[image].append((left, top, right, bottom, labels[annotation["category_id"]], is_crowd))
        numbers = [number for number in sorted(images) if rows[number] or not train]
        self._images = [(str(images[each]["file_name"]), sizes[each]) for each in numbers]
        self._boxes = [np.array(rows[each], np.float64).reshape(-1, 6) for each in numbers]

    def __len__(self) -> int:
        return len(self._images)

    def scene(self, index: int) -> Scene:
        """Return image ``index`` with its boxes; raises DataError where it cannot be read."""
        path = self.path(index)
        with opened_image(path) as file:
            image = file.convert("RGB")
        if image.size != (stated := self._images[index][1]):
            actual, expected = (f"{width} x {height}" for width, height in (image.size, stated))
            raise DataError(f"{path}: has {actual} pixels, {self._file} states {expected}: was it resized?")
        rows = self._boxes[index]
        limits = np.array([*image.size, *image.size])
        return Scene(image, np.clip(rows[:, :4], 0, limits), rows[:, 4].astype(np.int64), rows[:, 5].astype(np.int64))

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self._folder / self._images[index][0]

    def _labels(self, ids: Sequence[int], num_classes: int) -> Mapping[int, int]:
        if len(ids) == num_classes:
            return {each: label for label, each in enumerate(sorted(ids))}
        if not ids or min(ids) < 0 or max(ids) >= num_classes:
            has = f"{len(ids)} categories with ids up to {max(ids, default=0)}"
            raise DataError(f"{self._file}: has {has}; expected {num_classes} categories, or ids below {num_classes}")
        return {number: number for number in ids}


def centred(boxes: npt.NDArray[np.float64], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return boxes of corners in pixels as centre, width and height in parts of an image of ``size``."""
    low, high = boxes[:, :2] / size, boxes[:, 2:] / size
    return np.concatenate([(low + high) / 2, high - low], 1).astype(np.float32)
