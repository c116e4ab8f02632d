"""A small ResNet on Fashion-MNIST in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch
from torch import Tensor, nn

from accelmark.cases.resnet_mini._fashion import read_split
from accelmark.cases.resnet_mini._model import STEM_KERNEL, STEM_STRIDE, ResNetMini
from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.data.batches import Augment, TensorBatches, generator_for
from accelmark.frameworks.pytorch.tasks.classification import Classification
from accelmark.train.formulas import Conv, conv_flops, dense_flops

_SIDE: Final = 28
_NUM_CLASSES: Final = 10


def flip(batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
    """Flip half of the images horizontally."""
    image = batch["image"]
    chosen = torch.rand(len(image), 1, 1, 1, generator=random) < 0.5
    return {**batch, "image": torch.where(chosen.to(image.device), image.flip(3), image)}


class Case(Classification):
    """Image classification; the data set is kept in memory as bytes and normalised in the model."""

    def build_model(self) -> nn.Module:
        """Build the network with PyTorch's initial weights."""
        return ResNetMini(self._widths, self.number("blocks_per_stage"), _NUM_CLASSES)

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(self.number("width") * 2**stage for stage in range(self.number("num_stages")))

    def _batches(self, split: Literal["train", "test"], size: int, augment: Augment | None) -> Batches:
        image, label = read_split(self.data_dirs["fashion_mnist"], split)
        data = {"image": image, "label": label}
        return TensorBatches(data, size, self.place, train=split == "train", augment=augment)

    def train_batches(self) -> Batches:
        """Return the 60,000 training images, half of them flipped."""
        return self._batches("train", self.settings.batch_size, flip)

    def eval_batches(self) -> Batches:
        """Return the 10,000 test images."""
        return self._batches("test", self.settings.eval_batch_size, None)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images and labels."""
        random = generator_for(self.place.seed)
        return {
            "image": torch.randint(0, 256, (size, 1, _SIDE, _SIDE), generator=random, dtype=torch.uint8),
            "label": torch.randint(0, _NUM_CLASSES, (size,), generator=random),
        }

    def flops_per_sample(self) -> float:
        """Count convolutions and classifier, 2 K^2 C_in C_out HW each forward (He et al. 2015, arXiv:1512.03385)."""
        return conv_flops(self._convs()) + dense_flops(self._widths[-1] * _NUM_CLASSES, 1)

    def _convs(self) -> Iterator[Conv]:
        size, before = _SIDE // STEM_STRIDE, self._widths[0]
        yield Conv(size, STEM_KERNEL, 1, before, is_first=True)
        for stage, width in enumerate(self._widths):
            for block in range(self.number("blocks_per_stage")):
                size = -(-size // 2) if stage and not block else size
                yield Conv(size, 3, before, width)
                yield Conv(size, 3, width, width)
                if before != width:
                    yield Conv(size, 1, before, width)
                before = width
