"""A small ResNet on Fashion-MNIST in JAX, PaddlePaddle, MindSpore and TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, SIDE, STD, flip, read_split
from accelmark.spec.backports import zip_strict
from accelmark.tasks.images.arrays import ImageClassification
from accelmark.train.batches import Arrays
from accelmark.train.case import conv_flops, dense_flops, nn


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv(channels_in, channels_out, 3, nn.uniform, stride, padding=1)
        self.norm1 = nn.BatchNorm(channels_out)
        self.conv2 = nn.Conv(channels_out, channels_out, 3, nn.uniform, padding=1)
        self.norm2 = nn.BatchNorm(channels_out)
        self.is_projected = stride != 1 or channels_in != channels_out
        if self.is_projected:
            self.shortcut = nn.Conv(channels_in, channels_out, 1, nn.uniform, stride)
            self.shortcut_norm = nn.BatchNorm(channels_out)

    def forward(self, x: Any) -> Any:
        inner = nn.relu(self.norm1(self.conv1(x)))
        shortcut = self.shortcut_norm(self.shortcut(x)) if self.is_projected else x
        return nn.relu(self.norm2(self.conv2(inner)) + shortcut)


class ResNetMini(nn.Module):
    """A strided stem, one stage per width, and a classifier: uint8 images (batch, 1, height, width) to logits."""

    def __init__(self, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.normalize = nn.Normalize(MEAN, STD)
        self.stem, self.norm = nn.Conv(1, widths[0], 4, nn.uniform, 2, padding=1), nn.BatchNorm(widths[0])
        befores = [widths[0], *widths[:-1]]
        self.blocks = nn.List([
            Block(width if block else before, width, 2 if stage and not block else 1)
            for stage, (before, width) in enumerate(zip_strict(befores, widths))
            for block in range(blocks)
        ])  # fmt: skip
        self.classifier = nn.Linear(widths[-1], NUM_CLASSES, nn.uniform, bias=nn.uniform)

    def forward(self, image: Any) -> Any:
        """Return logits of shape (batch, classes)."""
        x = nn.relu(self.norm(self.stem(self.normalize(image))))
        for block in self.blocks:
            x = block(x)
        return self.classifier(nn.global_mean(x))


class Case(ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    image_shape = (1, SIDE, SIDE)
    num_classes = NUM_CLASSES
    reference_names: ClassVar = {
        r"^stem\.": "features.0.",
        r"^norm\.": "features.1.",
        r"^blocks\.0\.": "features.3.",
        r"^blocks\.1\.": "features.4.",
        r"^blocks\.2\.": "features.5.",
        r"\.shortcut\.": ".shortcut.0.",
        r"\.shortcut_norm\.": ".shortcut.1.",
    }

    @property
    def widths(self) -> list[int]:
        """Channels of each stage."""
        return [self.number("width") * 2**stage for stage in range(self.number("num_stages"))]

    def build_model(self) -> Any:
        """Build the network with PyTorch's distribution of initial weights."""
        return ResNetMini(self.widths, self.number("blocks_per_stage"))

    def dataset(self, *, train: bool) -> Arrays:
        image, label = read_split(self.data_dirs["fashion_mnist"], "train" if train else "test")
        return {"image": image, "label": label}

    def augment(self, batch: Arrays, random: np.random.Generator) -> Arrays:
        return {**batch, "image": flip(batch["image"], random)}

    def flops_per_sample(self) -> float:
        """Return the FLOPs of convolutions and classifier (He et al. 2015, arXiv:1512.03385)."""
        size, before = SIDE // 2, self.number("width")
        flops = conv_flops(size, 4, 1, before, is_first=True) + dense_flops(self.widths[-1] * NUM_CLASSES, 1)
        for stage, width in enumerate(self.widths):
            for block in range(self.number("blocks_per_stage")):
                size = -(-size // 2) if stage and not block else size
                flops += conv_flops(size, 3, before, width) + conv_flops(size, 3, width, width)
                flops += conv_flops(size, 1, before, width) if before != width else 0
                before = width
        return flops
