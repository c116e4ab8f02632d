"""Base class of inference cases on ImageNet's validation images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from accelmark.cases.imagenet import MEAN, STD, ImageFolder
from accelmark.infer.batches import LoaderBatches
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.spec.errors import DataError


@final
class _Validation(Dataset[tuple[Tensor, int]]):
    """Centre crops of ``val``, normalised."""

    def __init__(self, folder: ImageFolder, mean: Tensor, std: Tensor) -> None:
        self.folder = folder
        self.mean = mean
        self.std = std

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self.folder.read(index, torch.Generator())
        return (sample["image"].float() - self.mean) / self.std, int(sample["label"])


class ImageNetCase(InferCase):
    """Classification of normalised images; top-1 accuracy on ``val`` of the data directory."""

    input_names = ("image",)
    output_names = ("logits",)
    mean: ClassVar[tuple[float, float, float]] = MEAN
    """Mean of each channel, for values from 0 to 1."""
    std: ClassVar[tuple[float, float, float]] = STD

    def build_dataloader(self) -> InferBatches:
        """Read ``val`` in worker processes."""
        if "imagenet" not in self.data_dirs:
            raise DataError(
                "ImageNet is not here: name a directory that holds imagenet/val/<synset>/*.JPEG (--data DIR), or "
                "measure speed only with made-up data (--synthetic)"
            )
        folder = ImageFolder(
            self.data_dirs["imagenet"],
            "val",
            num_classes=self.number("num_classes"),
            size=self.number("image_size"),
            train=False,
        )
        images = _Validation(folder, *self.constants())
        return LoaderBatches(images, self.settings.batch_size, self.settings.num_workers, _collate)

    def constants(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation for pixel values from 0 to 255, of shape (3, 1, 1)."""
        mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (self.mean, self.std))
        return mean, std

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correct predictions."""
        return {"right": float((outputs[0].argmax(1) == labels).sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return top-1 accuracy."""
        return {"top1": sums["right"] / sums["count"]}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random normalised images."""
        side = self.number("image_size")
        return InferBatch((torch.randn(size, 3, side, side),), None)


def _collate(samples: list[Any]) -> InferBatch:
    images, labels = zip(*samples, strict=True)
    return InferBatch((torch.stack(images),), torch.tensor(labels))
