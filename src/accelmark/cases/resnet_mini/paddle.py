"""A small ResNet on Fashion-MNIST in Paddle."""

from __future__ import annotations

from functools import partial

import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.cases.resnet_mini._array_data import FashionImages
from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, STD
from accelmark.tasks.images.paddle import ImageClassification

_UNIFORM = nn.initializer.KaimingUniform(negative_slope=5**0.5, nonlinearity="leaky_relu")
"""PyTorch's initial weights of convolutions and linear layers."""


class Block(nn.Layer):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, data_format: str) -> None:
        super().__init__()
        conv = partial(nn.Conv2D, weight_attr=_UNIFORM, bias_attr=False, data_format=data_format)
        norm = partial(nn.BatchNorm2D, channels_out, data_format=data_format)
        self.conv1, self.norm1 = conv(channels_in, channels_out, 3, stride, 1), norm()
        self.conv2, self.norm2 = conv(channels_out, channels_out, 3, 1, 1), norm()
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(conv(channels_in, channels_out, 1, stride), norm())

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, halved in size where the stride is 2."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNetMini(nn.Layer):
    """A strided stem, stages of which each doubles the width, and a classifier: uint8 images to logits."""

    def __init__(self, width: int, num_stages: int, blocks_per_stage: int, *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        layout = "NHWC" if channels_last else "NCHW"
        stem = nn.Conv2D(1, width, 4, 2, 1, weight_attr=_UNIFORM, bias_attr=False, data_format=layout)
        layers = [stem, nn.BatchNorm2D(width, data_format=layout), nn.ReLU()]
        before = width
        for stage in range(num_stages):
            for block in range(blocks_per_stage):
                layers.append(Block(before, width * 2**stage, 2 if stage and not block else 1, layout))
                before = width * 2**stage
        self.features = nn.Sequential(*layers)
        bound = before**-0.5
        uniform = nn.initializer.Uniform(-bound, bound)
        self.classifier = nn.Linear(before, NUM_CLASSES, weight_attr=uniform, bias_attr=uniform)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images of shape (batch, 1, height, width)."""
        x = (image.astype("float32") - MEAN) / STD
        x = self.features(x.transpose([0, 2, 3, 1]) if self.channels_last else x)
        return self.classifier(x.mean([1, 2] if self.channels_last else [2, 3]))


class Case(FashionImages, ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    def build_model(self) -> nn.Layer:
        """Build the network with PyTorch's distribution of initial weights."""
        sizes = (self.number(name) for name in ("width", "num_stages", "blocks_per_stage"))
        return ResNetMini(*sizes, channels_last=self.settings.channels_last)
