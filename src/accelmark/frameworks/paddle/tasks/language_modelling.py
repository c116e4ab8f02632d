"""Language modelling: prediction of the next token, or of masked tokens."""

from __future__ import annotations

from collections.abc import Mapping

import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.frameworks.paddle.case import Batch, TrainCase
from accelmark.train.tasks.array_families import MaskedTokenData, TokenData
from accelmark.train.tasks.metrics import IGNORED


class NextToken(TokenData, TrainCase):
    """The model returns logits of shape (batch, length, vocabulary) for all tokens but the last."""

    def _loss(self, model: nn.Layer, batch: Batch, reduction: str) -> Tensor:
        tokens = batch[self.tokens].astype("int64")
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).astype("float32"), tokens[:, 1:].flatten(), reduction=reduction)

    def loss(self, model: nn.Layer, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats."""
        return self._loss(model, batch, "mean")

    def eval_sums(self, model: nn.Layer, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the cross entropies of the tokens."""
        return {"loss": self._loss(model, batch, "sum"), "count": batch[self.tokens][:, 1:].numel()}


class MaskedTokens(MaskedTokenData, TrainCase):
    """The model returns logits of shape (batch, predictions, vocabulary) for ``tokens`` and ``positions``."""

    def _loss(self, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        flat = logits.flatten(0, 1).astype("float32")
        return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction=reduction)

    def loss(self, model: nn.Layer, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the masked tokens."""
        return self._loss(model(batch["tokens"], batch["positions"]), batch["labels"], "mean")

    def eval_sums(self, model: nn.Layer, batch: Batch) -> Mapping[str, Tensor]:
        """Count the masked tokens that were predicted, and add up their cross entropies."""
        logits, labels = model(batch["tokens"], batch["positions"]), batch["labels"]
        # An ignored label is no token, so no prediction equals it.
        correct = (logits.argmax(-1) == labels).sum()
        return {
            "mlm_accuracy": correct,
            "loss": self._loss(logits, labels, "sum"),
            "count": (labels != IGNORED).sum(),
        }
