"""ResNet-50 v1.5 on ImageNet in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from accelmark.cases.imagenet import MEAN, STD, ImageFolder
from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.data.batches import IndexedBatches, generator_for
from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.frameworks.pytorch.tasks.classification import Classification
from accelmark.train.formulas import Conv, conv_flops, dense_flops

_STEM_WIDTH: Final = 64
_WIDTHS: Final = (256, 512, 1024, 2048)


class ResNet50(nn.Module):
    """ResNet of transformers with the stride in the 3x3 convolutions (v1.5): uint8 images to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, blocks: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        config = ResNetConfig(embedding_size=_STEM_WIDTH, hidden_sizes=list(_WIDTHS), depths=list(blocks))
        config.num_labels = num_classes
        self.net = ResNetForImageClassification(config)
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1) * 255, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.net((image.float() - self.mean) / self.std).logits
        return logits


class Case(Classification):
    """The 90-epoch schedule; images are normalised on the device."""

    accuracies: ClassVar = {"top1": 1, "top5": 5}

    def build_model(self) -> nn.Module:
        """Build ResNet-50; open runs may use fewer blocks per stage."""
        return ResNet50(self._blocks, self.number("num_classes"))

    @property
    def _blocks(self) -> tuple[int, ...]:
        return tuple(self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4))

    def _batches(self, split: str, size: int, *, train: bool) -> Batches:
        classes, side = self.number("num_classes"), self.number("image_size")
        folder = ImageFolder(
            self.data_dirs["imagenet"],
            split,
            num_classes=classes,
            size=side,
            train=train,
            draft=bool(self.settings.model["jpeg_draft"]),
        )
        return IndexedBatches(folder, size, self.place, self.settings.loader, train=train)

    def train_batches(self) -> Batches:
        """Return random resized crops, flipped with probability 0.5."""
        return self._batches("train", self.settings.batch_size, train=True)

    def eval_batches(self) -> Batches:
        """Return centre crops of ``val``."""
        return self._batches("val", self.settings.eval_batch_size, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images and labels."""
        random, side = generator_for(self.place.seed), self.number("image_size")
        return {
            "image": torch.randint(0, 256, (size, 3, side, side), generator=random, dtype=torch.uint8),
            "label": torch.randint(0, self.number("num_classes"), (size,), generator=random),
        }

    def flops_per_sample(self) -> float:
        """Count convolutions and classifier (He et al. 2015, arXiv:1512.03385, table 1, with v1.5's strides)."""
        return conv_flops(self._convs()) + dense_flops(_WIDTHS[-1] * self.number("num_classes"), 1)

    def _convs(self) -> Iterator[Conv]:
        size = -(-self.number("image_size") // 2)
        yield Conv(size, 7, 3, _STEM_WIDTH, is_first=True)
        size, before = -(-size // 2), _STEM_WIDTH
        for stage, (width, blocks) in enumerate(zip(_WIDTHS, self._blocks, strict=True)):
            for block in range(blocks):
                after = -(-size // 2) if stage and not block else size
                yield Conv(size, 1, before, width // 4)
                yield Conv(after, 3, width // 4, width // 4)
                yield Conv(after, 1, width // 4, width)
                if not block:
                    yield Conv(after, 1, before, width)
                size, before = after, width

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Scale the learning rate by global batch / ``lr_batch_size`` (Goyal et al. 2017, arXiv:1706.02677)."""
        settings = self.settings
        batch = settings.batch_size * settings.gradient_accumulation_steps * self.place.world_size
        rate = settings.optimizer.lr * batch / self.number("lr_batch_size")
        return build_optimizer(model, settings.optimizer.model_copy(update={"lr": rate}), self.place.device)
