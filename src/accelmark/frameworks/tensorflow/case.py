"""The interface of a training case in TensorFlow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.case import ArrayCase

Batch = Mapping[str, Any]
"""Named tensors with the samples along the first dimension."""


class TrainCase(ArrayCase):
    """A standard workload in TensorFlow: subclass it as ``Case`` in ``cases/<model>/tensorflow.py``.

    ``loss`` and ``eval_sums`` are traced into graphs: they compute with tensors and have no other side effects than
    those of the layers.
    """

    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: RankPlace, dtype: Any) -> None:
        super().__init__(settings, data_dirs, place)
        self.dtype = dtype
        """Type in which the model computes; its weights are float32."""

    @abstractmethod
    def build_model(self, random: np.random.Generator) -> tf.Module:
        """Return the model, of :mod:`accelmark.frameworks.tensorflow.layers`, with initial weights from ``random``."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean loss over the batch, a float32 scalar, by one call of ``model``."""

    @abstractmethod
    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the cross entropy of each label in float32, of the shape of ``labels``."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
