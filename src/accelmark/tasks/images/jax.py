"""Classification with one label per sample."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from accelmark.frameworks.jax.case import Batch, TrainCase, cross_entropy
from accelmark.tasks.images.arrays import ImageData


class ImageClassification(ImageData, TrainCase):
    """The model takes images as bytes of shape (batch, height, width, channels), and returns logits."""

    def _logits(self, model: Any, batch: Batch) -> jax.Array:
        logits: jax.Array = model(batch["image"].transpose(0, 2, 3, 1))
        return logits

    def loss(self, model: Any, batch: Batch) -> jax.Array:
        """Return the mean cross entropy."""
        return cross_entropy(self._logits(model, batch), batch["label"]).mean()

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, jax.Array]:
        """Count correct samples for each accuracy, and add up the cross entropies."""
        logits, label = self._logits(model, batch), batch["label"]
        _, best = jax.lax.top_k(logits, min(max(self.accuracies.values()), self.num_classes))
        correct = best == label[:, None]
        sums = {name: correct[:, :count].sum() for name, count in self.accuracies.items()}
        return {**sums, "loss": cross_entropy(logits, label).sum(), "count": jnp.ones_like(label).sum()}
