"""A small ResNet on Fashion-MNIST in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, SIDE, STD, read_split
from accelmark.tasks.images.pytorch import ImageClassification, flip


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
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x), inplace=True)


class ResNetMini(nn.Module):
    """A strided stem, stages that double the width, and a classifier: uint8 images to logits."""

    def __init__(self, width: int, num_stages: int, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        stem = nn.Conv2d(1, width, 4, 2, 1, bias=False)
        layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        before = width
        for stage in range(num_stages):
            for block in range(blocks_per_stage):
                layers.append(Block(before, width * 2**stage, 2 if stage and not block else 1))
                before = width * 2**stage
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        features: Tensor = self.features((image.float() - MEAN) / STD)
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class Case(ImageClassification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    image_shape = (1, SIDE, SIDE)
    num_classes = NUM_CLASSES

    def build_model(self) -> nn.Module:
        """Build the network with PyTorch's initial weights."""
        return ResNetMini(*(self.number(name) for name in ("width", "num_stages", "blocks_per_stage")))

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the 60,000 training or the 10,000 test images."""
        image, label = read_split(self.data_dirs["fashion_mnist"], "train" if train else "test")
        return {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        return {**batch, "image": flip(batch["image"], random)}
