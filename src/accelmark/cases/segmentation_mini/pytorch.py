"""Semantic segmentation of canvases of Fashion-MNIST's items in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn
from transformers.modeling_outputs import SemanticSegmenterOutput

from accelmark.cases.detection_mini.pytorch import Canvases, Pyramid
from accelmark.cases.resnet_mini._fashion import MEAN, STD
from accelmark.frameworks.pytorch.batches import ReadSamples
from accelmark.tasks.images.data import Uniform
from accelmark.tasks.segmentation.pytorch import Change, Segmentation, Segments, segmented_sample


class Pixels(nn.Module):
    """A class for each place of a pyramid, a quarter of the image's resolution."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.pyramid, self.classes = Pyramid(width), nn.Conv2d(2 * width, num_classes, 1)

    def forward(self, pixel_values: Tensor) -> SemanticSegmenterOutput:
        """Return logits of shape (batch, classes, height / 4, width / 4)."""
        return SemanticSegmenterOutput(logits=self.classes(self.pyramid(pixel_values)))


class Case(Segmentation):
    """One to four items of ten classes on a canvas, with the background as a class."""

    own_rate = ("backbone", 1.0)
    mean, std = (MEAN / 255,) * 3, (STD / 255,) * 3

    def network(self) -> Any:
        return Pixels(self.number("hidden_size"), self.number("num_classes"))

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return canvases of training images, half of them mirrored, or of test images."""
        canvases = Canvases.of(self, train=train)
        change: Change = mirrored if train else lambda image, segments, _: (image, segments)
        return ReadSamples(len(canvases), partial(segmented_sample, canvases.pair, change))


def mirrored(image: Image.Image, segments: Segments, uniform: Uniform) -> tuple[Image.Image, Segments]:
    """Return half of the images with their classes mirrored."""
    if uniform() < 0.5:
        return image, segments
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), np.ascontiguousarray(segments[:, ::-1])
