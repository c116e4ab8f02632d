"""Language modelling: prediction of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import FromArrays, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.tasks.language.data import TokenShards
from accelmark.tasks.metrics import PredictedTokens

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart


class NextToken(PredictedTokens, TaskFamily):
    """Next-token prediction over samples of ``seq_length + 1`` tokens, by default windows of token shards."""

    dtype: ClassVar[torch.dtype] = torch.int64
    shards: ClassVar[str]
    """Name of the data set."""
    shared: ClassVar[int] = 1
    """Tokens that a window shares with the next one; 0 for rows that were packed beforehand."""

    def dataset(self, *, train: bool) -> FromArrays | dict[str, Tensor]:
        """Return windows of ``train`` or of ``val``; ``eval_samples`` under ``model`` limits those of ``val``."""
        row, limit = self.number("seq_length") + 1, None
        if not train and self.settings.model.get("eval_samples") is not None:
            limit = self.number("eval_samples")
        directory, split = self.data_dirs[self.shards], "train" if train else "val"
        return FromArrays(TokenShards(directory, split, row, row - self.shared, self.vocab_size, limit))

    def synthetic_batch(self, size: int) -> Batch:
        shape, random = (size, self.number("seq_length") + 1), generator_for(self.place.seed)
        return {self.tokens: torch.randint(0, self.vocab_size, shape, generator=random, dtype=self.dtype)}

    def model_input(self, batch: Batch) -> Tensor:
        """Return all tokens but the last of each sample."""
        return batch[self.tokens].long()[:, :-1]

    @property
    def of_sequence(self) -> dict[str, SequencePart]:
        """Return the argument with which a model returns the output of this rank's part of whole sequences."""
        return {} if self.sequence is None else {"sequence": self.sequence}

    def _labels(self, batch: Batch) -> Tensor:
        labels = batch[self.tokens].long()[:, 1:]
        return labels if self.sequence is None else self.sequence.of(labels)

    def _loss(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        logits: Tensor = model(self.model_input(batch), **self.of_sequence)
        labels = self._labels(batch)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats."""
        return self._loss(model, batch, "mean")

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {"loss": self._loss(model, batch, "sum"), "count": torch.ones_like(self._labels(batch)).sum()}
