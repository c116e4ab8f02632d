"""Tokens on NumPy arrays: data, loss and metrics in any framework with the layers ``nn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from accelmark.tasks.language.data import TokenShards
from accelmark.tasks.metrics import PredictedTokens
from accelmark.train.batches import Arrays
from accelmark.train.case import ArrayCase, Batch, decoder_flops, nn

STD: Final = 0.02
"""Standard deviation of the initial weights of decoders, as in transformers."""


class NextToken(PredictedTokens, ArrayCase):
    """Samples of ``seq_length + 1`` tokens for next-token prediction. The model returns logits of each but the last."""

    token_type: ClassVar[type[np.integer[Any]]] = np.int64

    def synthetic_batch(self, size: int) -> Arrays:
        shape = (size, self.number("seq_length") + 1)
        return {self.tokens: self.random.integers(0, self.vocab_size, shape).astype(self.token_type)}

    def loss(self, model: Any, batch: Batch) -> Any:
        tokens, labels = nn.neighbours(batch[self.tokens])
        return nn.cross_entropy(model(tokens), labels)

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        tokens, labels = nn.neighbours(batch[self.tokens])
        return {"loss": nn.cross_entropy(model(tokens), labels, "sum"), "count": labels.shape[0] * labels.shape[1]}


class Decoder(nn.Module):
    """Tokens to logits, with rotary positions and a separate output layer (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, sizes: Mapping[str, int], block: Callable[[], Any], eps: float = 1e-5) -> None:
        """Take the sizes under ``model``, and a function that returns a new block: ``block(x, cos, sin)``."""
        super().__init__()
        hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
        self.embedding = nn.Embedding(vocabulary, hidden, nn.normal(STD))
        self.layers = nn.List([block() for _ in range(sizes["num_layers"])])
        self.norm, self.head = nn.RmsNorm(hidden, eps), nn.Linear(hidden, vocabulary, nn.normal(STD))
        self.rotary = nn.Rotary(hidden // sizes["num_heads"], sizes["seq_length"])

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        """Return logits of shape (batch, length, vocabulary), or the mean cross entropy of ``labels``."""
        x = self.embedding(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else nn.cross_entropy(logits, labels)


class DecoderPretraining(NextToken):
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
        feed = self.feed_matrices * self.number("hidden_size") * self.number("intermediate_size")
        return decoder_flops(self.sizes, feed)
