"""A small ResNet on Fashion-MNIST in MindSpore."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from accelmark.cases.resnet_mini._array_data import FashionImages
from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, STD
from accelmark.frameworks.mindspore.layers import convolution, linear
from accelmark.tasks.images.mindspore import ImageClassification
from accelmark.train.initial_weights import Initial, uniform


class Block(nn.Cell):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, initial: Initial) -> None:
        super().__init__()
        self.conv1 = convolution(channels_in, channels_out, 3, initial, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = convolution(channels_out, channels_out, 3, initial, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = convolution(channels_in, channels_out, 1, initial, stride)
            self.shortcut = nn.SequentialCell(projection, nn.BatchNorm2d(channels_out))

    def construct(self, x: Tensor) -> Tensor:
        """Return the block's output, halved in size where the stride is 2."""
        inner = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNetMini(nn.Cell):
    """A strided stem, one stage per width, and a classifier: uint8 images (batch, 1, height, width) to logits."""

    def __init__(self, widths: Sequence[int], blocks: int, initial: Initial) -> None:
        super().__init__()
        layers = [convolution(1, widths[0], 4, initial, 2, padding=1), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        befores = [widths[0], *widths[:-1]]
        layers += [
            Block(width if block else before, width, 2 if stage and not block else 1, initial)
            for stage, (before, width) in enumerate(zip(befores, widths, strict=True))
            for block in range(blocks)
        ]
        self.features = nn.SequentialCell(*layers)
        self.classifier = linear(widths[-1], NUM_CLASSES, initial, bias=True)

    def construct(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        x = self.features((image.astype(ms.float32) - MEAN) / STD)
        return self.classifier(x.mean((2, 3)))


class Case(FashionImages, ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    def build_model(self, random: np.random.Generator) -> nn.Cell:
        """Build the network with PyTorch's distribution of initial weights."""
        widths = [self.number("width") * 2**stage for stage in range(self.number("num_stages"))]
        return ResNetMini(widths, self.number("blocks_per_stage"), uniform(random))
