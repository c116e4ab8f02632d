"""The interface of a training case in Paddle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from paddle import Tensor, nn

from accelmark.train.case import ArrayCase

Batch = Mapping[str, Tensor]
"""Named tensors on the device, with the samples along the first dimension."""


class TrainCase(ArrayCase):
    """A standard workload in Paddle: subclass it as ``Case`` in ``cases/<model>/paddle.py``.

    The driver owns the loop, precision, parallelism, logging, timing, checkpoints and the end of training.
    """

    block_class: ClassVar[str | None] = None
    """Name of the class of the model's repeated blocks, if it has any: the unit of activation checkpointing."""

    @abstractmethod
    def build_model(self) -> nn.Layer:
        """Return the model with its initial weights in float32; called with the same seed on every rank."""

    @abstractmethod
    def loss(self, model: nn.Layer, batch: Batch) -> Tensor:
        """Return the mean loss over the batch, a scalar, by one call of ``model``; runs under the driver's autocast."""

    @abstractmethod
    def eval_sums(self, model: nn.Layer, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""
