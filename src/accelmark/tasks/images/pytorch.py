"""Classification of images or text with one label per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.tasks.metrics import Classified, ImageSizes


class Logits(nn.Module):
    """A classifier of transformers for images, or for tokens with a padding mask, that returns its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, classes), or for each token (batch, length, classes)."""
        logits: Tensor = (self.net(inputs) if mask is None else self.net(inputs, mask)).logits
        return logits


class Classification(Classified, TaskFamily):
    """A batch has the inputs of the model, and ``label`` of shape (batch,); the model returns logits."""

    inputs: ClassVar[tuple[str, ...]] = ("image",)
    """Names of the batch's tensors that the model takes, in order."""

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(*(batch[name] for name in self.inputs))
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["label"])

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count correct samples for each accuracy, and add up the cross entropies."""
        logits, label = self._logits(model, batch), batch["label"]
        most = max(self.accuracies.values())
        best = logits.argmax(1, keepdim=True) if most == 1 else logits.topk(min(most, logits.shape[1])).indices
        correct = best == label[:, None]
        sums = {name: correct[:, :count].sum() for name, count in self.accuracies.items()}
        loss = F.cross_entropy(logits.float(), label, reduction="sum")
        return {**sums, "loss": loss, "count": torch.ones_like(label).sum()}


class ImageClassification(ImageSizes, Classification):
    """Classification of images as bytes."""

    def synthetic_batch(self, size: int) -> Batch:
        random = generator_for(self.place.seed)
        return {
            "image": torch.randint(0, 256, (size, *self.image_shape), generator=random, dtype=torch.uint8),
            "label": torch.randint(0, self.num_classes, (size,), generator=random),
        }


def flip(images: Tensor, random: torch.Generator) -> Tensor:
    """Flip half of the images of a batch horizontally."""
    chosen = torch.rand(len(images), 1, 1, 1, generator=random) < 0.5
    return torch.where(chosen.to(images.device), images.flip(3), images)
