"""ResNet-50 v1.5 on ImageNet in TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from accelmark.cases.resnet50._imagenet import WIDTHS, ImageNetData
from accelmark.frameworks.tensorflow.layers import BatchNorm, Conv2D, Linear, normal_fan_out
from accelmark.tasks.images.data import MEAN, STD
from accelmark.tasks.images.tensorflow import ImageClassification
from accelmark.train.initial_weights import uniform


class ConvNorm(tf.Module):
    """A convolution with batch normalization."""

    def __init__(
        self, channels_in: int, channels_out: int, size: int, stride: int, dtype: Any, random: np.random.Generator
    ) -> None:
        super().__init__()
        initial = normal_fan_out(random)
        self.convolution = Conv2D(channels_in, channels_out, size, initial, dtype, stride, padding=size // 2)
        self.normalization = BatchNorm(channels_out)

    def __call__(self, x: Any) -> Any:
        """Return the normalized convolution."""
        return self.normalization(self.convolution(x))


class Bottleneck(tf.Module):
    """1x1, 3x3 with the stride (v1.5) and 1x1 convolutions, with a shortcut that is projected if the shape changes."""

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, dtype: Any, random: np.random.Generator
    ) -> None:
        super().__init__()
        inner = channels_out // 4
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut = ConvNorm(channels_in, channels_out, 1, stride, dtype, random)
        self.layer = [
            ConvNorm(channels_in, inner, 1, 1, dtype, random),
            ConvNorm(inner, inner, 3, stride, dtype, random),
            ConvNorm(inner, channels_out, 1, 1, dtype, random),
        ]

    def __call__(self, x: Any) -> Any:
        """Return the block's output, halved in size where the stride is 2."""
        first, second, third = self.layer
        beside = self.shortcut(x) if self.is_projected else x
        return tf.nn.relu(third(tf.nn.relu(second(tf.nn.relu(first(x))))) + beside)


class ResNet50(tf.Module):
    """uint8 images (batch, height, width, 3) to logits."""

    def __init__(self, blocks: Sequence[int], num_classes: int, dtype: Any, random: np.random.Generator) -> None:
        super().__init__()
        self.embedder = ConvNorm(3, 64, 7, 2, dtype, random)
        befores = (64, *WIDTHS)
        self.stages = [
            [
                Bottleneck(width if block else before, width, 2 if stage and not block else 1, dtype, random)
                for block in range(count)
            ]
            for stage, (before, width, count) in enumerate(zip(befores, WIDTHS, blocks, strict=False))
        ]
        self.classifier = Linear(WIDTHS[-1], num_classes, uniform(random), dtype, bias=True)

    def __call__(self, image: Any) -> Any:
        """Return logits of shape (batch, classes)."""
        mean, std = 255 * np.array(MEAN, np.float32), 255 * np.array(STD, np.float32)
        x = tf.nn.relu(self.embedder((tf.cast(image, tf.float32) - mean) / std))
        x = tf.nn.max_pool2d(x, 3, 2, [[0, 0], [1, 1], [1, 1], [0, 0]])
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.classifier(tf.reduce_mean(x, (1, 2)))


class Case(ImageNetData, ImageClassification):
    """The 90-epoch schedule; images are normalised on the device."""

    def build_model(self, random: np.random.Generator) -> tf.Module:
        """Build ResNet-50."""
        return ResNet50(self.blocks, self.num_classes, self.dtype, random)
