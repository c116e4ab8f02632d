"""A small ResNet on Fashion-MNIST in TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from accelmark.cases.resnet_mini._array_data import FashionImages
from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, STD
from accelmark.frameworks.tensorflow.layers import BatchNorm, Conv2D, Linear
from accelmark.tasks.images.tensorflow import ImageClassification
from accelmark.train.initial_weights import Initial, uniform


class Block(tf.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, initial: Initial, dtype: Any) -> None:
        super().__init__()
        self.conv1 = Conv2D(channels_in, channels_out, 3, initial, dtype, stride, padding=1)
        self.conv2 = Conv2D(channels_out, channels_out, 3, initial, dtype, padding=1)
        self.norm1, self.norm2 = BatchNorm(channels_out), BatchNorm(channels_out)
        self.shortcut: list[Any] = []
        if stride != 1 or channels_in != channels_out:
            self.shortcut = [Conv2D(channels_in, channels_out, 1, initial, dtype, stride), BatchNorm(channels_out)]

    def __call__(self, x: Any) -> Any:
        """Return the block's output, halved in size where the stride is 2."""
        inner = tf.nn.relu(self.norm1(self.conv1(x)))
        for layer in self.shortcut:
            x = layer(x)
        return tf.nn.relu(self.norm2(self.conv2(inner)) + x)


class ResNetMini(tf.Module):
    """A strided stem, one stage per width, and a classifier: uint8 images (batch, height, width, 1) to logits."""

    def __init__(self, widths: Sequence[int], blocks: int, initial: Initial, dtype: Any) -> None:
        super().__init__()
        self.stem, self.norm = Conv2D(1, widths[0], 4, initial, dtype, stride=2, padding=1), BatchNorm(widths[0])
        befores = [widths[0], *widths[:-1]]
        self.blocks = [
            Block(width if block else before, width, 2 if stage and not block else 1, initial, dtype)
            for stage, (before, width) in enumerate(zip(befores, widths, strict=True))
            for block in range(blocks)
        ]
        self.classifier = Linear(widths[-1], NUM_CLASSES, initial, dtype, bias=True)

    def __call__(self, image: Any) -> Any:
        """Return logits of shape (batch, classes)."""
        x = tf.nn.relu(self.norm(self.stem((tf.cast(image, tf.float32) - MEAN) / STD)))
        for block in self.blocks:
            x = block(x)
        return self.classifier(tf.reduce_mean(x, (1, 2)))


class Case(FashionImages, ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    reference_names: ClassVar = {
        r"^stem\.": "features.0.",
        r"^norm\.": "features.1.",
        r"^blocks\.0\.": "features.3.",
        r"^blocks\.1\.": "features.4.",
        r"^blocks\.2\.": "features.5.",
    }

    def build_model(self, random: np.random.Generator) -> tf.Module:
        """Build the network with PyTorch's distribution of initial weights."""
        widths = [self.number("width") * 2**stage for stage in range(self.number("num_stages"))]
        return ResNetMini(widths, self.number("blocks_per_stage"), uniform(random), self.dtype)
