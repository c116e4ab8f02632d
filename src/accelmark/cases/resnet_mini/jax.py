"""A small ResNet on Fashion-MNIST in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import variance_scaling

from accelmark.cases.resnet_mini._array_data import FashionImages
from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, STD
from accelmark.tasks.images.jax import ImageClassification

_UNIFORM = variance_scaling(1 / 3, "fan_in", "uniform")
"""PyTorch's initial weights of convolutions and linear layers."""


class Block(nnx.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = partial(nnx.Conv, use_bias=False, dtype=dtype, kernel_init=_UNIFORM, rngs=rngs)
        norm = partial(nnx.BatchNorm, channels_out, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv1, self.norm1 = conv(channels_in, channels_out, (3, 3), stride, padding=1), norm()
        self.conv2, self.norm2 = conv(channels_out, channels_out, (3, 3), padding=1), norm()
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut, self.shortcut_norm = conv(channels_in, channels_out, (1, 1), stride, padding=0), norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the block's output, halved in size where the stride is 2."""
        inner = nnx.relu(self.norm1(self.conv1(x)))
        beside = self.shortcut_norm(self.shortcut(x)) if self.is_projected else x
        return nnx.relu(self.norm2(self.conv2(inner)) + beside)


class ResNetMini(nnx.Module):
    """A strided stem, one stage per width, and a classifier: uint8 images (batch, height, width, 1) to logits."""

    def __init__(self, widths: Sequence[int], blocks: int, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = partial(nnx.Conv, use_bias=False, dtype=dtype, kernel_init=_UNIFORM, rngs=rngs)
        self.stem = conv(1, widths[0], (4, 4), 2, padding=1)
        self.norm = nnx.BatchNorm(widths[0], momentum=0.9, dtype=dtype, rngs=rngs)
        befores = [widths[0], *widths[:-1]]
        self.blocks = nnx.List(
            Block(width if block else before, width, 2 if stage and not block else 1, dtype, rngs)
            for stage, (before, width) in enumerate(zip(befores, widths, strict=True))
            for block in range(blocks)
        )
        self.classifier = nnx.Linear(widths[-1], NUM_CLASSES, dtype=dtype, kernel_init=_UNIFORM, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Return logits of shape (batch, classes)."""
        x = nnx.relu(self.norm(self.stem((image.astype(jnp.float32) - MEAN) / STD)))
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.classifier(x.mean((1, 2)))
        return logits


class Case(FashionImages, ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    reference_names: ClassVar = {
        r"^stem\.": "features.0.",
        r"^norm\.": "features.1.",
        r"^blocks\.0\.": "features.3.",
        r"^blocks\.1\.": "features.4.",
        r"^blocks\.2\.": "features.5.",
        r"\.shortcut\.": ".shortcut.0.",
        r"\.shortcut_norm\.": ".shortcut.1.",
    }

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the network with PyTorch's distribution of initial weights."""
        widths = [self.number("width") * 2**stage for stage in range(self.number("num_stages"))]
        return ResNetMini(widths, self.number("blocks_per_stage"), self.dtype, rngs)
