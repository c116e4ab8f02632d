"""The interface of a training case in JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings import Scalar, TrainSettings
from accelmark.train.tasks.arrays import ArrayBatches, ArrayPlace

Batch = Mapping[str, Any]
"""Named arrays with the samples along the first dimension: NumPy from the data, JAX in ``loss`` and ``eval_sums``."""


class TrainCase(ABC):
    """A standard workload in JAX: subclass it as ``Case`` in ``cases/<model>/jax.py``.

    ``loss`` and ``eval_sums`` are traced: they compute with JAX arrays and have no side effects.
    """

    inputs: ClassVar[tuple[str, ...]]

    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: RankPlace, dtype: Any) -> None:
        self.settings = settings
        self.data_dirs = data_dirs
        self.place = place
        self.dtype = dtype
        """Type in which the model computes; its weights are float32."""

    def number(self, name: str) -> int:
        """Return one of the case's own integer settings (``settings.model``)."""
        value: Scalar = self.settings.model[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"model.{name} is {value!r}, not a whole number")
        return value

    def batches(self, arrays: Mapping[str, np.ndarray], *, train: bool, augment: Any = None) -> ArrayBatches:
        """Return this rank's share of arrays that hold a whole split."""
        settings = self.settings
        size = settings.batch_size if train else settings.eval_batch_size
        place = ArrayPlace(self.place.rank, self.place.world_size, settings.seed)
        return ArrayBatches(arrays, size, place, train=train, augment=augment)

    @abstractmethod
    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the model with its initial weights in float32, from random numbers of ``rngs`` only."""

    @abstractmethod
    def train_batches(self) -> ArrayBatches:
        """Return this rank's share of the training data, ``settings.batch_size`` samples a batch."""

    @abstractmethod
    def eval_batches(self) -> ArrayBatches:
        """Return this rank's share of the evaluation data: every sample exactly once over all ranks."""

    @abstractmethod
    def synthetic_batch(self, size: int) -> dict[str, np.ndarray]:
        """Return a synthetic batch with the shapes, types and value ranges of real data."""

    @abstractmethod
    def loss(self, model: nnx.Module, batch: Batch) -> jax.Array:
        """Return the mean loss over the batch, a float32 scalar."""

    @abstractmethod
    def eval_sums(self, model: nnx.Module, batch: Batch) -> dict[str, jax.Array]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn the added-up sums into metrics; one of them has the name of the target's metric."""

    def flops_per_sample(self) -> float | None:
        """Return forward and backward FLOPs of one sample by formula, to check the counted ones; or None."""
        return None


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of each label in float32, of the shape of ``labels``."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
