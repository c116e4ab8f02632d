"""Object detection on canvases of Fashion-MNIST's items in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor, nn
from transformers import ResNetBackbone, ResNetConfig
from transformers.image_transforms import center_to_corners_format
from transformers.loss.loss_for_object_detection import generalized_box_iou

from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, SIDE, STD, read_split
from accelmark.frameworks.pytorch.batches import ReadSamples, TaskFamily
from accelmark.frameworks.pytorch.model.hugging_face import backbone_config
from accelmark.spec.backports import zip_strict
from accelmark.tasks.detection.pytorch import Detection, Labels, Scene, boxed_sample, overlaps
from accelmark.tasks.images.data import Uniform
from accelmark.tasks.segmentation.pytorch import Segments

_SCALES: Final = (0.6, 1.4)
_LARGEST_OVERLAP: Final = 0.05
_TRIES: Final = 20
_DARKEST: Final = 16
"""Pixels below this value do not belong to an item."""
BACKGROUND: Final = NUM_CLASSES + 1
"""Class of the pixels outside items; classes of items start at 1."""


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


_STRIDE: Final = 4
_DETECTIONS: Final = 20
_RARE: Final = -2.2
"""Added to all logits: few places are the centre of an object."""


class Pyramid(nn.Module):
    """The stages of a small ResNet, added up at the resolution of the first, a quarter of the image's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stages = [width // 2, width, 2 * width]
        config = backbone_config(
            ResNetConfig,
            embedding_size=width // 2,
            hidden_sizes=stages,
            depths=[1, 1, 1],
            layer_type="basic",
            out_features=["stage1", "stage2", "stage3"],
        )
        self.backbone = ResNetBackbone(config)
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in stages)
        self.shared = nn.Conv2d(width, 2 * width, 3, padding=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return features of shape (batch, 2 x width, height / 4, width / 4)."""
        maps = self.backbone(pixel_values).feature_maps
        size = maps[0].shape[-2:]
        parts = [F.interpolate(layer(each), size) for layer, each in zip_strict(self.lateral, maps)]
        return F.relu(self.shared(F.relu(torch.stack(parts).sum(0))))


class Points(nn.Module):
    """Objects as points (Zhou et al. 2019, arXiv:1904.07850): places that are the centre of an object of a class.

    Each place of a pyramid has a logit for each class, and the distances to the four sides of the box whose centre is
    there.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.pyramid = Pyramid(width)
        self.classes, self.sides = nn.Conv2d(2 * width, num_classes, 1), nn.Conv2d(2 * width, 4, 1)
        self.loss_function: nn.Module | Any = point_loss

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor, labels: Labels | None = None) -> Mapping[str, Tensor]:
        """Return ``logits`` and ``pred_boxes`` (centre, width, height in parts of the image) of each place."""
        hidden = self.pyramid(pixel_values)
        size = hidden.shape[-2:]
        logits = self.classes(hidden).flatten(2).transpose(1, 2) + _RARE
        sides = F.softplus(self.sides(hidden).flatten(2).transpose(1, 2).float())
        boxes = _boxes(sides, size)
        outputs = {"logits": logits, "pred_boxes": boxes}
        if labels is not None:
            outputs["loss"] = self.loss_function(logits, boxes, labels, size)
        return outputs


def _boxes(sides: Tensor, size: torch.Size) -> Tensor:
    """Return centre, width and height from distances to left, top, right and bottom in places."""
    height, width = size
    down, across = torch.meshgrid(
        torch.arange(height, device=sides.device), torch.arange(width, device=sides.device), indexing="ij"
    )
    place = torch.stack([across, down], 2).view(-1, 2) + 0.5
    low, high = place - sides[..., :2], place + sides[..., 2:]
    return torch.cat([(low + high) / 2, high - low], 2) / torch.tensor([width, height] * 2, device=sides.device)


def point_loss(logits: Tensor, boxes: Tensor, labels: Labels, size: torch.Size) -> Tensor:
    """Return the focal loss of the heat map (equation 1 of arXiv:1904.07850), and the loss of the boxes' overlaps.

    The target of a class is 1 at the place of a centre and falls off around it, with a deviation of a sixth of the box.
    """
    height, width = size
    scale = torch.tensor([width, height], device=boxes.device)
    image = torch.cat([torch.full_like(each["class_labels"], row) for row, each in enumerate(labels)])
    label = torch.cat([each["class_labels"] for each in labels])
    target_boxes = torch.cat([each["boxes"] for each in labels])
    centre = (target_boxes[:, :2] * scale).long()
    across = torch.arange(width, device=boxes.device) - centre[:, :1]
    down = torch.arange(height, device=boxes.device) - centre[:, 1:]
    spread = 2 * (target_boxes[:, 2:] * scale / 6).clamp(min=0.3).square()
    near = (-down.square() / spread[:, 1:])[:, :, None] + (-across.square() / spread[:, :1])[:, None]
    heat = torch.zeros(len(logits) * logits.shape[2], height * width, device=boxes.device)
    row = (image * logits.shape[2] + label)[:, None].expand(-1, height * width)
    heat = heat.scatter_reduce(0, row, near.exp().flatten(1), "amax")
    heat = heat.view(len(logits), -1, height * width).transpose(1, 2)
    chance, at_centre = logits.sigmoid(), heat == 1
    focal = (1 - chance).square() * F.logsigmoid(logits)
    missed = (1 - heat).pow(4) * chance.square() * F.logsigmoid(-logits)
    total = -torch.where(at_centre, focal, missed).sum()
    proposed = boxes[image, centre[:, 1] * width + centre[:, 0]]
    corners: Any = center_to_corners_format  # neither has types
    overlap: Any = generalized_box_iou
    shared: Tensor = overlap(corners(proposed), corners(target_boxes)).diagonal()
    return (total + (1 - shared).sum()) / max(1, len(target_boxes))


class Case(Detection):
    """One to four items of ten classes on a canvas."""

    samples = "fashion_mnist"
    mean, std = (MEAN / 255,) * 3, (STD / 255,) * 3

    def network(self) -> Any:
        return Points(self.number("hidden_size"), self.number("num_classes"))

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return canvases of training images, or of test images."""
        canvases = Canvases.of(self, train=train)
        return ReadSamples(len(canvases), partial(boxed_sample, canvases.scene, partial(self.changed, train=train)))

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return the canvas, in training flipped or not."""
        return scene.flipped() if train and uniform() < 0.5 else scene

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places that have the largest logit of a class among their neighbours; no others are suppressed."""
        side = self.number("image_size") // _STRIDE
        heat = logits.sigmoid().transpose(1, 2).reshape(len(logits), -1, side, side)
        peaks = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
        score, chosen = peaks.flatten(1).topk(_DETECTIONS)
        return score, chosen // side**2, chosen % side**2
