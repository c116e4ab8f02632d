"""Base class of the task families."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accelmark.frameworks.pytorch.case import Batches, TrainCase
from accelmark.frameworks.pytorch.data.batches import IndexedBatches, SampleSource, TensorBatches


class TaskFamily(TrainCase):
    """A case with a data set; a case that builds its own batches overrides ``train_batches`` and ``eval_batches``."""

    def dataset(self, *, train: bool) -> Mapping[str, Tensor] | SampleSource:
        """Return the training or the evaluation data: whole tensors by name, or a source that is read by sample."""
        raise NotImplementedError(f"{type(self).__name__} defines neither dataset() nor its own batches")

    def augment(self, batch: dict[str, Tensor], random: torch.Generator) -> dict[str, Tensor]:
        """Change a training batch, with random numbers from ``random`` only."""
        return batch

    def train_batches(self) -> Batches:
        """Return the training data in a new order each epoch."""
        return self._batches(self.settings.batch_size, train=True)

    def eval_batches(self) -> Batches:
        """Return the evaluation data, the same in every evaluation."""
        return self._batches(self.settings.eval_batch_size, train=False)

    def _batches(self, size: int, *, train: bool) -> Batches:
        data = self.dataset(train=train)
        augment = self.augment if train else None
        if isinstance(data, Mapping):
            return TensorBatches(data, size, self.place, train=train, augment=augment)
        return IndexedBatches(data, size, self.place, self.settings.loader, train=train, augment=augment)
