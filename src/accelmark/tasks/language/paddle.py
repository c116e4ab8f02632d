"""Prediction of the next token or of masked tokens, and pretraining of decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.frameworks.paddle.case import Batch, TrainCase
from accelmark.frameworks.paddle.layers import Attention, RmsNorm, TiedProjection, linear, rotary_angles, rotate
from accelmark.tasks.language.arrays import MaskedTokenData, TokenData, TokenShardData
from accelmark.tasks.metrics import IGNORED


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


_STD: Final = 0.02
"""Standard deviation of the initial weights, as in transformers."""


class LlamaLayer(nn.Layer):
    """Causal attention with rotary embeddings and a gated feed-forward part, each with a residual connection."""

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
        self.width = hidden // sizes["num_heads"]
        self.attention_norm, self.feed_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.query, self.out = linear(hidden, hidden, _STD), linear(hidden, hidden, _STD)
        self.key, self.value = (linear(hidden, sizes["num_kv_heads"] * self.width, _STD) for _ in range(2))
        self.gate, self.up = (linear(hidden, intermediate, _STD) for _ in range(2))
        self.down = linear(intermediate, hidden, _STD)
        self.attention = Attention(causal=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        normed, shape = self.attention_norm(x), [*x.shape[:2], -1, self.width]
        query, key, value = (project(normed).reshape(shape) for project in (self.query, self.key, self.value))
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
        mixed = self.attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.out(mixed.reshape(x.shape))
        normed = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Layer):
    """Tokens to logits, with an output layer of its own (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
        self.embedding = nn.Embedding(vocabulary, hidden, weight_attr=nn.initializer.Normal(0.0, _STD))
        self.layers = nn.LayerList([LlamaLayer(sizes, eps) for _ in range(sizes["num_layers"])])
        self.norm, self.head = RmsNorm(hidden, eps), linear(hidden, vocabulary, _STD)
        for name, angles in rotary_angles(hidden // sizes["num_heads"], sizes["seq_length"]).items():
            self.register_buffer(name, angles, persistable=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class GptLayer(nn.Layer):
    """Causal attention and a feed-forward part, each with a norm before it and a residual connection."""

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden, intermediate, self.heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_heads"]
        normal = nn.initializer.Normal(0.0, _STD)
        self.attention_norm, self.feed_norm = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.qkv = nn.Linear(hidden, 3 * hidden, weight_attr=normal)
        self.out = nn.Linear(hidden, hidden, weight_attr=normal)
        self.up, self.down = (nn.Linear(*sizes, weight_attr=normal) for sizes in _both_ways(hidden, intermediate))
        self.attention = Attention(causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).reshape([batch, length, 3, self.heads, hidden // self.heads])
        x = x + self.out(self.attention(*parts.unbind(2)).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.feed_norm(x)), approximate=True))


def _both_ways(size: int, other: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (size, other), (other, size)


class Gpt(nn.Layer):
    """Tokens to logits, with learned positions; the output layer is the embedding (Radford et al. 2019, GPT-2)."""

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden, normal = sizes["hidden_size"], nn.initializer.Normal(0.0, _STD)
        self.embedding = nn.Embedding(sizes["vocab_size"], hidden, weight_attr=normal)
        self.positions = nn.Embedding(sizes["seq_length"], hidden, weight_attr=normal)
        self.layers = nn.LayerList([GptLayer(sizes, eps) for _ in range(sizes["num_layers"])])
        self.norm, self.head = nn.LayerNorm(hidden, eps), TiedProjection()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.positions(paddle.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x), self.embedding.weight)


class Pretraining(TokenShardData, NextToken):
    """Pretraining of a decoder from random weights."""
