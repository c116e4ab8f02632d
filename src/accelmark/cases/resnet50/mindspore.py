"""ResNet-50 v1.5 on ImageNet in MindSpore."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from accelmark.cases.resnet50._imagenet import WIDTHS, ImageNetData
from accelmark.frameworks.mindspore.layers import convolution, linear, normal_fan_out
from accelmark.tasks.images.data import MEAN, STD
from accelmark.tasks.images.mindspore import ImageClassification
from accelmark.train.initial_weights import uniform


class ConvNorm(nn.Cell):
    """A convolution with batch normalization."""

    def __init__(
        self, channels_in: int, channels_out: int, size: int, stride: int, random: np.random.Generator
    ) -> None:
        super().__init__()
        initial = normal_fan_out(random)
        self.convolution = convolution(channels_in, channels_out, size, initial, stride, padding=size // 2)
        self.normalization = nn.BatchNorm2d(channels_out)

    def construct(self, x: Tensor) -> Tensor:
        """Return the normalized convolution."""
        return self.normalization(self.convolution(x))


class Bottleneck(nn.Cell):
    """1x1, 3x3 with the stride (v1.5) and 1x1 convolutions, with a shortcut that is projected if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, random: np.random.Generator) -> None:
        super().__init__()
        inner = channels_out // 4
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut = ConvNorm(channels_in, channels_out, 1, stride, random)
        self.layer = nn.CellList([
            ConvNorm(channels_in, inner, 1, 1, random),
            ConvNorm(inner, inner, 3, stride, random),
            ConvNorm(inner, channels_out, 1, 1, random),
        ])  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the block's output, halved in size where the stride is 2."""
        first, second, third = self.layer
        beside = self.shortcut(x) if self.is_projected else x
        return ops.relu(third(ops.relu(second(ops.relu(first(x))))) + beside)


class ResNet50(nn.Cell):
    """uint8 images (batch, 3, height, width) to logits."""

    def __init__(self, blocks: Sequence[int], num_classes: int, random: np.random.Generator) -> None:
        super().__init__()
        self.embedder = ConvNorm(3, 64, 7, 2, random)
        self.pool = nn.MaxPool2d(3, 2, pad_mode="pad", padding=1)
        befores = (64, *WIDTHS)
        self.stages = nn.CellList([
            nn.SequentialCell([
                Bottleneck(width if block else before, width, 2 if stage and not block else 1, random)
                for block in range(count)
            ])
            for stage, (before, width, count) in enumerate(zip(befores, WIDTHS, blocks, strict=False))
        ])  # fmt: skip
        self.classifier = linear(WIDTHS[-1], num_classes, uniform(random), bias=True)
        self.mean, self.std = (Tensor(255 * np.array(each, np.float32).reshape(3, 1, 1)) for each in (MEAN, STD))

    def construct(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        x = self.pool(ops.relu(self.embedder((image.astype(ms.float32) - self.mean) / self.std)))
        for stage in self.stages:
            x = stage(x)
        return self.classifier(x.mean((2, 3)))


class Case(ImageNetData, ImageClassification):
    """The 90-epoch schedule; images are normalised on the device."""

    def build_model(self, random: np.random.Generator) -> nn.Cell:
        """Build ResNet-50."""
        return ResNet50(self.blocks, self.num_classes, random)
