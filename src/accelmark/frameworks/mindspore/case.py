"""The interface of a training case in MindSpore."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
from mindspore import Tensor, nn

from accelmark.train.case import ArrayCase

Batch = Mapping[str, Tensor]
"""Named tensors on the device, with the samples along the first dimension."""


class TrainCase(ArrayCase):
    """A standard workload in MindSpore: subclass it as ``Case`` in ``cases/<model>/mindspore.py``.

    The driver owns the loop, precision, parallelism, logging, timing, checkpoints and the end of training. It compiles
    ``loss`` and ``eval_sums``, which compute with tensors and have no side effects. Use ``narrow`` and ``ops.chunk`` in
    them and in the model: functions that index a tensor with ``[]`` are not compiled, and a step takes several times as
    long.
    """

    @abstractmethod
    def build_model(self, random: np.random.Generator) -> nn.Cell:
        """Return the model with its initial weights in float32, from random numbers of ``random`` only."""

    @abstractmethod
    def loss(self, model: nn.Cell, batch: Batch) -> Tensor:
        """Return the mean loss over the batch, a float32 scalar."""

    @abstractmethod
    def eval_sums(self, model: nn.Cell, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""
