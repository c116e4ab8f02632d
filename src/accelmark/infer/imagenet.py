"""Base class of inference cases on ImageNet's validation images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelmark.infer.case import ClassificationCase, InferBatch, InferBatches, LoaderBatches
from accelmark.infer.weights import pretrained
from accelmark.spec.errors import DataError
from accelmark.tasks.images.data import MEAN, STD
from accelmark.tasks.images.pytorch_imagenet import ImageFolder, ImageNetwork


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, folder: ImageFolder, mean: Tensor, std: Tensor) -> None:
        self.folder, self.mean, self.std = folder, mean, std

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self.folder.read(index, torch.Generator())
        return (sample["image"].float() - self.mean) / self.std, int(sample["label"])


class ImageNetCase(ClassificationCase, ImageNetwork):
    """Classification of normalised images; top-1 accuracy on ``val`` of the data directory."""

    input_names = ("image",)
    mean: ClassVar[tuple[float, float, float]] = MEAN
    """Mean of each channel, for values from 0 to 1."""
    std: ClassVar[tuple[float, float, float]] = STD
    exports_products: ClassVar[bool] = False
    """Whether ONNX has attention as products: PyTorch's exporter fails on the fused one of Swin's windows."""

    def create_model(self) -> nn.Module:
        return pretrained(self, self.network())

    def export_model(self, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
        if not self.exports_products:
            return super().export_model(model, example, path)
        net: Any = model.net
        fused = net.config._attn_implementation
        net.set_attn_implementation("eager")
        try:
            return super().export_model(model, example, path)
        finally:
            net.set_attn_implementation(fused)

    def build_dataloader(self) -> InferBatches:
        self.data_dir("imagenet", "imagenet/val/<synset>/*.JPEG")
        return LoaderBatches(self._images("val"), self.settings)

    def calibration_batch(self, size: int) -> InferBatch:
        """Read images of ``train``, centre crops as in ``val``, spread over its classes."""
        if not (self.data_dirs.get("imagenet", Path()) / "train").is_dir():
            raise DataError(
                "no images for the calibration of int8, which must not measure the accuracy: name a directory that "
                "holds imagenet/train/<synset>/*.JPEG (--data DIR), or choose another precision"
            )
        images = self._images("train")
        return InferBatch((torch.stack([images[len(images) * item // size][0] for item in range(size)]),), None)

    def _images(self, split: str) -> _Images:
        classes, side = self.number("num_classes"), self.number("image_size")
        folder = ImageFolder(self.data_dirs["imagenet"], split, num_classes=classes, size=side, train=False)
        return _Images(folder, *self.constants())

    def constants(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation for pixel values from 0 to 255, of shape (3, 1, 1)."""
        mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (self.mean, self.std))
        return mean, std

    def synthetic_batch(self, size: int) -> InferBatch:
        side = self.number("image_size")
        return InferBatch((torch.randn(size, 3, side, side),), None)
