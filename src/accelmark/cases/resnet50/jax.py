"""ResNet-50 v1.5 on ImageNet in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import variance_scaling

from accelmark.cases.resnet50._imagenet import WIDTHS, ImageNetData
from accelmark.tasks.images.data import MEAN, STD
from accelmark.tasks.images.jax import ImageClassification

_NORMAL = variance_scaling(2.0, "fan_out", "normal")
"""Initial weights of convolutions (He et al. 2015, arXiv:1502.01852), as in transformers."""
_UNIFORM = variance_scaling(1 / 3, "fan_in", "uniform")
"""PyTorch's initial weights of linear layers."""


class ConvNorm(nnx.Module):
    """A convolution with batch normalization."""

    def __init__(self, channels_in: int, channels_out: int, size: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(
            channels_in, channels_out, (size, size), stride, padding=size // 2, use_bias=False, dtype=dtype,
            kernel_init=_NORMAL, rngs=rngs,
        )  # fmt: skip
        self.normalization = nnx.BatchNorm(channels_out, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalized convolution."""
        normed: jax.Array = self.normalization(self.convolution(x))
        return normed


class Bottleneck(nnx.Module):
    """1x1, 3x3 with the stride (v1.5) and 1x1 convolutions, with a shortcut that is projected if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> None:
        inner = channels_out // 4
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut = ConvNorm(channels_in, channels_out, 1, stride, dtype, rngs)
        self.layer = nnx.List(
            [
                ConvNorm(channels_in, inner, 1, 1, dtype, rngs),
                ConvNorm(inner, inner, 3, stride, dtype, rngs),
                ConvNorm(inner, channels_out, 1, 1, dtype, rngs),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the block's output, halved in size where the stride is 2."""
        first, second, third = self.layer
        beside = self.shortcut(x) if self.is_projected else x
        return nnx.relu(third(nnx.relu(second(nnx.relu(first(x))))) + beside)


class ResNet50(nnx.Module):
    """uint8 images (batch, height, width, 3) to logits."""

    def __init__(self, blocks: Sequence[int], num_classes: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embedder = ConvNorm(3, 64, 7, 2, dtype, rngs)
        befores = (64, *WIDTHS)
        self.stages = nnx.List(
            nnx.List(
                Bottleneck(width if block else before, width, 2 if stage and not block else 1, dtype, rngs)
                for block in range(count)
            )
            for stage, (before, width, count) in enumerate(zip(befores, WIDTHS, blocks, strict=False))
        )
        self.classifier = nnx.Linear(
            WIDTHS[-1], num_classes, dtype=dtype, kernel_init=_UNIFORM, bias_init=_bias, rngs=rngs
        )

    def __call__(self, image: jax.Array) -> jax.Array:
        """Return logits of shape (batch, classes)."""
        mean, std = 255 * np.array(MEAN, np.float32), 255 * np.array(STD, np.float32)
        x = nnx.relu(self.embedder((image.astype(jnp.float32) - mean) / std))
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        logits: jax.Array = self.classifier(x.mean((1, 2)))
        return logits


def _bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bound = WIDTHS[-1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Case(ImageNetData, ImageClassification):
    """The 90-epoch schedule; images are normalised on the device."""

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build ResNet-50."""
        return ResNet50(self.blocks, self.num_classes, self.dtype, rngs)
