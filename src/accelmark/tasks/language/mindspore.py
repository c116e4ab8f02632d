"""Prediction of the next token."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from accelmark.frameworks.mindspore.case import Batch, TrainCase
from accelmark.tasks.language.arrays import TokenData


class NextToken(TokenData, TrainCase):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the model returns logits of each."""

    def _losses(self, model: nn.Cell, batch: Batch) -> Tensor:
        tokens = batch[self.tokens].astype(ms.int32)
        length = tokens.shape[1] - 1
        logits = model(tokens.narrow(1, 0, length)).astype(ms.float32)
        labels = tokens.narrow(1, 1, length).reshape(-1)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction="none")

    def loss(self, model: nn.Cell, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats."""
        return self._losses(model, batch).mean()

    def eval_sums(self, model: nn.Cell, batch: Batch) -> dict[str, Tensor]:
        """Add up the cross entropies of the tokens."""
        losses = self._losses(model, batch)
        return {"loss": losses.sum(), "count": ops.ones_like(losses).sum()}
