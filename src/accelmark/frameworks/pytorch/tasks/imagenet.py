"""Images of an ImageNet folder as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from accelmark.frameworks.pytorch.tasks.augmentation import erase, rand_augment
from accelmark.train.tasks.image_folder import MOST_NUMBERS, FolderImages


@final
class ImageFolder(FolderImages):
    """The images of one split, with random numbers of PyTorch.

    ``rand_magnitude`` and ``erase_probability`` are those of RandAugment and random erasing in training; 0: off.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        train: bool,
        rand_magnitude: float = 0.0,
        erase_probability: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(directory, split, train=train, **options)
        self._rand_magnitude, self._erase_probability = rand_magnitude * train, erase_probability * train

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``image``, uint8 of shape (3, size, size), and ``label``."""
        alter = partial(rand_augment, magnitude=self._rand_magnitude, random=random) if self._rand_magnitude else None
        numbers = iter(torch.rand(MOST_NUMBERS, generator=random, dtype=torch.float64).tolist())
        sample = self.sample(index, lambda: next(numbers), alter)
        image = torch.from_numpy(sample["image"])
        if self._erase_probability:
            image = erase(image, self._erase_probability, random)
        return {"image": image, "label": torch.from_numpy(sample["label"])}
