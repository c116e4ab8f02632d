"""Flow matching on Fashion-MNIST in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from accelmark.cases.resnet_mini._fashion import MEAN, NUM_CLASSES, STD, read_split
from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.tasks.generation.pytorch import EMPTY_SHARE, EVAL_TIMES, FlowMatching

_BORDER = 2
"""Background on each side, so that 32 x 32 pixels become 16 channels of 8 x 8."""


class Case(FlowMatching):
    """The transformer of ``flux`` at small size; latents are pixels, and an image's class is its caption."""

    samples = "fashion_mnist"

    def dataset(self, *, train: bool) -> Mapping[str, Tensor]:
        """Return the training images, or the first test images with noise and times."""
        image, label = read_split(self.data_dirs[self.samples], "train" if train else "test")
        tensors = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}
        if train:
            return tensors
        some = {name: part[: self.number("eval_images")] for name, part in tensors.items()}
        times = torch.arange(len(some["label"])) % EVAL_TIMES / EVAL_TIMES
        return _noised(some, times, generator_for(0))

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Draw noise and times, and drop a tenth of the classes."""
        count = len(batch["label"])
        noised = _noised(batch, torch.rand(count, generator=random), random)
        kept = torch.rand(count, 1, generator=random) >= EMPTY_SHARE
        return {**noised, "words": noised["words"] * kept[:, None], "caption": noised["caption"] * kept}


def _noised(batch: Mapping[str, Tensor], time: Tensor, random: torch.Generator) -> dict[str, Tensor]:
    pixels = F.pad((batch["image"] - MEAN) / STD, [_BORDER] * 4, value=-MEAN / STD)
    latent = F.pixel_unshuffle(pixels, 4)
    caption = F.one_hot(batch["label"], NUM_CLASSES).float()
    noise = torch.randn(latent.shape, generator=random)
    return {"latent": latent, "noise": noise, "time": time, "words": caption[:, None], "caption": caption}
