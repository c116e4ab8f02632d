"""Changes of an image together with its boxes: flips, crops, sizes and colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

from accelmark.train.tasks.image_folder import Uniform

_OVERLAPS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Least overlaps of a box with a crop (Liu et al. 2016, arXiv:1512.02325, section 2.2); 1: no crop."""
_TRIES: Final = 40
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
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
        """Return a part, with what is inside it of the boxes; boxes without a pixel in it are left out."""
        boxes = np.clip(self.boxes - [left, top, left, top], 0, [width, height, width, height])
        inside = (boxes[:, 2:] - boxes[:, :2]).min(1, initial=np.inf) >= 1
        image = self.image.crop((left, top, left + width, top + height))
        return Scene(image, boxes[inside], self.labels[inside], self.crowd[inside])


class Scenes(Protocol):
    """Images with boxes, read one at a time."""

    def __len__(self) -> int: ...

    def scene(self, index: int) -> Scene:
        """Return image ``index`` with its boxes; raises DataError where it cannot be read."""
        ...


def whole_number(low: int, high: int, uniform: Uniform) -> int:
    """Return a random number from ``low`` to ``high``."""
    return low + int(uniform() * (high - low + 1))


def chosen(values: Sequence[T], uniform: Uniform) -> T:
    """Return one of the values."""
    return values[whole_number(0, len(values) - 1, uniform)]


def multi_scale(scene: Scene, side: int, longest: int, uniform: Uniform) -> Scene:
    """Augment as DETR (Carion et al. 2020, arXiv:2005.12872, section 4): a flip, and one of 11 sizes, cropped or not.

    ``side`` is the largest shorter side; all sizes are in proportion to those of the paper with 800 pixels.
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
            kept = replace(scene, boxes=scene.boxes[inside], labels=scene.labels[inside], crowd=scene.crowd[inside])
            return kept.cropped(left, top, width, height)
    return scene


def overlaps(boxes: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return intersection over union of each box with another one."""
    shared = np.clip(np.minimum(boxes[:, 2:], other[2:]) - np.maximum(boxes[:, :2], other[:2]), 0, None).prod(1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (other[2:] - other[:2]).prod() - shared
    ratios: npt.NDArray[np.float64] = shared / union
    return ratios


def coloured(image: Image.Image, uniform: Uniform) -> Image.Image:
    """Return it with other brightness, contrast, saturation and hue, each with probability 0.5."""
    changes = ((ImageEnhance.Brightness, 0.125), (ImageEnhance.Contrast, 0.5), (ImageEnhance.Color, 0.5))
    for enhance, most in changes:
        if uniform() < 0.5:
            image = enhance(image).enhance(1 + most * (2 * uniform() - 1))
    if uniform() < 0.5:
        image = _turned(image, 0.05 * (2 * uniform() - 1))
    return image


def _turned(image: Image.Image, share: float) -> Image.Image:
    """Turn the hue by a share of the circle."""
    hue, saturation, value = image.convert("HSV").split()
    shift = round(share * 256)
    return Image.merge("HSV", (hue.point([(each + shift) % 256 for each in range(256)]), saturation, value)).convert(
        "RGB"
    )
