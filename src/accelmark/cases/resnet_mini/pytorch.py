"""A small ResNet on Fashion-MNIST in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import NUM_CLASSES, SIDE, read_split
from accelmark.cases.resnet_mini._model import ResNetMini
from accelmark.tasks.images.pytorch import ImageClassification, flip


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
        """Flip half of the images."""
        return {**batch, "image": flip(batch["image"], random)}
