"""Prediction of the next token."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from accelmark.frameworks.tensorflow.case import Batch, TrainCase, cross_entropy
from accelmark.tasks.language.arrays import TokenData


class NextToken(TokenData, TrainCase):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the model returns logits of each."""

    def _losses(self, model: Any, batch: Batch) -> Any:
        tokens = tf.cast(batch[self.tokens], tf.int32)
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def loss(self, model: Any, batch: Batch) -> Any:
        """Return the mean cross entropy of a token, in nats."""
        return tf.reduce_mean(self._losses(model, batch))

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Add up the cross entropies of the tokens."""
        losses = self._losses(model, batch)
        return {"loss": tf.reduce_sum(losses), "count": tf.size(losses)}
