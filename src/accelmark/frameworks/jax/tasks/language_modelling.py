"""Prediction of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from accelmark.frameworks.jax.case import Batch, TrainCase, cross_entropy
from accelmark.train.tasks.metrics import language_model_metrics


class NextToken(TrainCase):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the last one is only predicted."""

    tokens: ClassVar[str] = "tokens"
    """Name of the batch's only array, of shape (batch, seq_length + 1)."""
    token_type: ClassVar[type[np.integer[Any]]] = np.int32
    reported: ClassVar[Mapping[str, str]] = {"eval_loss": "eval_loss", "perplexity": "perplexity"}
    """Metric of the case -> metric of the family."""
    vocab_size: int

    def synthetic_batch(self, size: int) -> dict[str, np.ndarray]:
        """Return random tokens."""
        shape = (size, self.number("seq_length") + 1)
        random = np.random.default_rng((self.settings.seed, self.place.rank))
        return {self.tokens: random.integers(0, self.vocab_size, shape).astype(self.token_type)}

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

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics of a held-out token."""
        found = language_model_metrics(sums)
        return {name: found[source] for name, source in self.reported.items()}
