"""The data of ResNet-50 for frameworks with NumPy batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from accelmark.tasks.images.arrays import ImageData
from accelmark.tasks.images.data import ArrayImages
from accelmark.train.schedules import scaled_learning_rate

WIDTHS = (256, 512, 1024, 2048)
"""Channels of each stage's output; within a block a quarter of them."""


class ImageNetData(ImageData):
    """Random resized crops of ``train``, flipped with probability 0.5, and centre crops of ``val``."""

    accuracies: ClassVar = {"top1": 1, "top5": 5}
    reference_names: ClassVar = {
        r"^embedder\.": "net.resnet.embedder.embedder.",
        r"^stages\.(\d+)\.": r"net.resnet.encoder.stages.\1.layers.",
        r"^classifier\.": "net.classifier.1.",
    }

    @property
    def blocks(self) -> Sequence[int]:
        """Blocks of each stage; open runs may use fewer."""
        return [self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]

    def dataset(self, *, train: bool) -> ArrayImages:
        """Return the images of a split."""
        return ArrayImages(
            self.data_dirs["imagenet"],
            "train" if train else "val",
            num_classes=self.num_classes,
            size=self.number("image_size"),
            train=train,
            draft=bool(self.settings.model["jpeg_draft"]),
        )

    def peak_learning_rate(self) -> float:
        """Scale the learning rate by the global batch."""
        return scaled_learning_rate(self.settings, self.place.world_size, self.number("lr_batch_size"))
