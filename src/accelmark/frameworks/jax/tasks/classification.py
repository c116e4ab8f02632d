"""Classification with one label per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from accelmark.frameworks.jax.case import Batch, TrainCase, cross_entropy
from accelmark.train.tasks.metrics import classification_metrics


class Classification(TrainCase):
    """A batch has the inputs of the model, and ``label`` of shape (batch,); the model returns logits."""

    inputs: ClassVar[tuple[str, ...]] = ("image",)

    def loss(self, model: Any, batch: Batch) -> jax.Array:
        """Return the mean cross entropy."""
        return cross_entropy(model(*(batch[name] for name in self.inputs)), batch["label"]).mean()

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, jax.Array]:
        """Count correct samples, and add up the cross entropies."""
        logits, label = model(*(batch[name] for name in self.inputs)), batch["label"]
        correct = (logits.argmax(-1) == label).sum()
        return {"top1": correct, "loss": cross_entropy(logits, label).sum(), "count": jnp.ones_like(label).sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the accuracy and the mean loss."""
        return classification_metrics(sums, ["top1"])
