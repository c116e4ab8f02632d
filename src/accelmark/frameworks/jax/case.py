"""The interface of a training case in JAX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.case import ArrayCase

Batch = Mapping[str, Any]
"""Named arrays with the samples along the first dimension."""


class TrainCase(ArrayCase):
    """A standard workload in JAX: subclass it as ``Case`` in ``cases/<model>/jax.py``.

    ``loss`` and ``eval_sums`` are traced: they compute with JAX arrays and have no side effects.
    """

    def __init__(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: RankPlace, dtype: Any) -> None:
        super().__init__(settings, data_dirs, place)
        self.dtype = dtype
        """Type in which the model computes; its weights are float32."""

    @abstractmethod
    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the model with its initial weights in float32, from random numbers of ``rngs`` only."""

    @abstractmethod
    def loss(self, model: nnx.Module, batch: Batch) -> jax.Array:
        """Return the mean loss over the batch, a float32 scalar."""

    @abstractmethod
    def eval_sums(self, model: nnx.Module, batch: Batch) -> dict[str, jax.Array]:
        """Return sums over the batch, scalars that add up over batches and ranks (``correct``, ``count``)."""


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of each label in float32, of the shape of ``labels``."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
