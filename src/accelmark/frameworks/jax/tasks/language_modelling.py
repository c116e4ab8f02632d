"""Prediction of the next token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from accelmark.frameworks.jax.case import Batch, TrainCase, cross_entropy
from accelmark.train.tasks.array_families import TokenData


class NextToken(TokenData, TrainCase):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the model returns logits of each."""

    def _losses(self, model: Any, batch: Batch) -> jax.Array:
        tokens = batch[self.tokens].astype(jnp.int32)
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def loss(self, model: Any, batch: Batch) -> jax.Array:
        """Return the mean cross entropy of a token, in nats."""
        return self._losses(model, batch).mean()

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, jax.Array]:
        """Add up the cross entropies of the tokens."""
        losses = self._losses(model, batch)
        return {"loss": losses.sum(), "count": jnp.ones_like(losses).sum()}
