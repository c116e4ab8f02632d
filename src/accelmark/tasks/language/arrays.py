"""Tokens on NumPy arrays: data and metrics, without model and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from accelmark.tasks.language.data import TokenShards
from accelmark.tasks.metrics import PredictedTokens, classification_metrics
from accelmark.train.batches import Arrays
from accelmark.train.case import ArrayCase
from accelmark.train.formulas import attention_flops, dense_flops


class TokenData(PredictedTokens, ArrayCase):
    """Samples of ``seq_length + 1`` tokens for next-token prediction."""

    token_type: ClassVar[type[np.integer[Any]]] = np.int64

    def synthetic_batch(self, size: int) -> Arrays:
        """Return random tokens."""
        shape = (size, self.number("seq_length") + 1)
        return {self.tokens: self.random.integers(0, self.vocab_size, shape).astype(self.token_type)}


class TokenShardData(TokenData):
    """Pretraining of a decoder on token shards; open runs may reduce its size by ``model``."""

    shards: ClassVar[str]
    """Name of the data set."""
    feed_matrices: ClassVar[int] = 3
    """Matrices of a feed-forward part, each of the shape (hidden, intermediate)."""

    def dataset(self, *, train: bool) -> TokenShards:
        """Return windows of ``train`` or of ``val``."""
        length, split = self.number("seq_length"), "train" if train else "val"
        return TokenShards(self.data_dirs[self.shards], split, length + 1, length, self.vocab_size)

    def flops_per_sample(self) -> float:
        """Return 6 x matrix weights x tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
        sizes, hidden, length = self.sizes, self.number("hidden_size"), self.number("seq_length")
        kv_width = hidden * sizes.get("num_kv_heads", sizes["num_heads"]) // sizes["num_heads"]
        feed = self.feed_matrices * hidden * sizes["intermediate_size"]
        weights = sizes["num_layers"] * (2 * hidden * (hidden + kv_width) + feed) + hidden * self.vocab_size
        return dense_flops(weights, length) + attention_flops(sizes["num_layers"], hidden, length)


class MaskedTokenData(ArrayCase):
    """Masked tokens: ``tokens`` (batch, length), and ``positions`` with ``labels`` of shape (batch, predictions)."""

    def synthetic_batch(self, size: int) -> Arrays:
        """Return random tokens, positions and labels."""
        random, vocabulary = self.random, self.number("vocab_size")
        length, predictions = self.number("seq_length"), self.number("max_predictions")
        return {
            "tokens": random.integers(0, vocabulary, (size, length)),
            "positions": random.integers(0, length, (size, predictions)),
            "labels": random.integers(0, vocabulary, (size, predictions)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy and mean loss over masked tokens."""
        return classification_metrics(sums, ["mlm_accuracy"])
