"""Images of an ImageNet folder as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from accelmark.train.tasks.image_folder import FolderImages


@final
class ImageFolder(FolderImages):
    """The images of one split, with random numbers of PyTorch."""

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``image``, uint8 of shape (3, size, size), and ``label``."""
        sample = self.sample(index, lambda: float(torch.rand((), generator=random, dtype=torch.float64)))
        return {name: torch.from_numpy(array) for name, array in sample.items()}
