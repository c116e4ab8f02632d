"""ResNet-50 v1.5 on ImageNet in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.frameworks.pytorch.tasks.classification import ImageClassification
from accelmark.frameworks.pytorch.tasks.imagenet import ImageFolder
from accelmark.train.schedules import scaled_learning_rate
from accelmark.train.tasks.image_folder import MEAN, STD


class ResNet50(nn.Module):
    """ResNet of transformers with the stride in the 3x3 convolutions (v1.5): uint8 images to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, blocks: Sequence[int], num_classes: int) -> None:
        super().__init__()
        config = ResNetConfig(embedding_size=64, hidden_sizes=[256, 512, 1024, 2048], depths=list(blocks))
        config.num_labels = num_classes
        self.net = ResNetForImageClassification(config)
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1) * 255, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.net((image.float() - self.mean) / self.std).logits
        return logits


class Case(ImageClassification):
    """The 90-epoch schedule; images are normalised on the device."""

    accuracies: ClassVar = {"top1": 1, "top5": 5}

    def build_model(self) -> nn.Module:
        """Build ResNet-50; open runs may use fewer blocks per stage."""
        return ResNet50([self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)], self.num_classes)

    def dataset(self, *, train: bool) -> ImageFolder:
        """Return random resized crops of ``train``, flipped with probability 0.5, or centre crops of ``val``."""
        return ImageFolder(
            self.data_dirs["imagenet"],
            "train" if train else "val",
            num_classes=self.num_classes,
            size=self.number("image_size"),
            train=train,
            draft=bool(self.settings.model["jpeg_draft"]),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Scale the learning rate by the global batch."""
        rate = scaled_learning_rate(self.settings, self.place.world_size, self.number("lr_batch_size"))
        return build_optimizer(model, self.settings.optimizer.model_copy(update={"lr": rate}), self.place.device)
