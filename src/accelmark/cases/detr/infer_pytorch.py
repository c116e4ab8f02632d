"""Inference of DETR on COCO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelmark.infer.case import InferBatch, InferBatches, InferCase, LoaderBatches
from accelmark.infer.weights import load_given_weights
from accelmark.spec.errors import DataError
from accelmark.tasks.detection.pytorch import BoxedImages, best_classes, centred, detr, precision_rows
from accelmark.tasks.images.data import MEAN, STD
from accelmark.tasks.metrics import box_precision

_MOST_BOXES = 128
"""Boxes of an image that labels have room for; images of val2017 have up to 63."""


class _Boxes(nn.Module):
    """DETR with plain tensors as outputs."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (items, queries, classes + 1) and boxes (items, queries, 4) in parts of the image.

        ``mask``, (items, side, side), is 1 for pixels of the image and 0 for those beside it.
        """
        outputs = self.net(pixel_values=image * mask[:, None].to(image.dtype), pixel_mask=mask)
        return outputs.logits, outputs.pred_boxes


class _Images(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """``val2017`` with a longer side of ``side`` pixels, filled up with zeros at the right and at the bottom."""

    def __init__(self, images: BoxedImages, side: int) -> None:
        self._images, self._side = images, side

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return image, mask, and labels: width, height and number of boxes, then a row for each box."""
        scene, side = self._images.scene(index), self._side
        if len(scene.labels) > _MOST_BOXES:
            raise DataError(f"{self._images.path(index)}: has more than {_MOST_BOXES} boxes")
        labels = torch.zeros(1 + _MOST_BOXES, 6)
        labels[0, :3] = torch.tensor([*scene.image.size, len(scene.labels)])
        classes = np.stack([scene.labels, scene.crowd], 1)
        boxes = np.concatenate([centred(scene.boxes, scene.image.size), classes], 1)
        labels[1 : 1 + len(boxes)] = torch.from_numpy(boxes)
        scale = side / max(scene.image.size)
        width, height = (max(1, round(length * scale)) for length in scene.image.size)
        pixels = np.array(scene.resized(width, height).image, np.float32) / 255
        image, mask = torch.zeros(3, side, side), torch.zeros(side, side, dtype=torch.uint8)
        image[:, :height, :width] = torch.from_numpy(((pixels - MEAN) / STD).transpose(2, 0, 1))
        mask[:height, :width] = 1
        return image, mask, labels


class Case(InferCase):
    """COCO's ``val2017``, with weights of facebook/detr-resnet-50."""

    input_names = ("image", "mask")
    output_names = ("logits", "boxes")

    def create_model(self) -> nn.Module:
        net = detr(self.number)
        load_given_weights(self, net)
        return _Boxes(net)

    def build_dataloader(self) -> InferBatches:
        coco = self.data_dir("coco", "coco/val2017 and coco/annotations")
        images = BoxedImages(coco, "val2017", num_classes=self.number("num_classes"), train=False)
        return LoaderBatches(_Images(images, self.number("image_size")), self.settings)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float | Tensor]:
        """Return the boxes of the images and those detected, in pixels of the files."""
        score, label, _ = best_classes(outputs[0])
        batch = {
            "boxes": labels[:, 1:, :4],
            "label": labels[:, 1:, 4],
            "crowd": labels[:, 1:, 5],
            "size": labels[:, 0, :2],
            "count": labels[:, 0, 2],
            "index": torch.arange(len(labels)),
        }
        return precision_rows(score, label, outputs[1], batch)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return nothing: precision follows from all detections."""
        return {}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return ``map`` and ``map50``."""
        return box_precision(rows["boxes"], rows["detections"])

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random normalised images with a ratio of 4:3."""
        side = self.number("image_size")
        mask = torch.zeros(size, side, side, dtype=torch.uint8)
        mask[:, : side * 3 // 4] = 1
        return InferBatch((torch.randn(size, 3, side, side), mask), None)
