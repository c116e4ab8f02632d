"""A residual network for small greyscale images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import MEAN, STD

STEM_KERNEL: Final = 4
STEM_STRIDE: Final = 2


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, halved in size where the stride is 2."""
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x), inplace=True)


class ResNetMini(nn.Module):
    """A strided stem, one stage per width, and a classifier: uint8 images to logits."""

    def __init__(self, widths: Sequence[int], blocks: int, num_classes: int) -> None:
        super().__init__()
        stem = nn.Conv2d(1, widths[0], STEM_KERNEL, STEM_STRIDE, 1, bias=False)
        layers: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Block(before, width, 2 if stage and not block else 1))
                before = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        features: Tensor = self.features((image.float() - MEAN) / STD)
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits
