"""Pretraining of GPT-3 6.7B in Paddle."""

from __future__ import annotations

from functools import partial
from typing import Final

import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.frameworks.paddle.layers import Attention, Module
from accelmark.tasks.language.arrays import DecoderPretraining

_NORMAL: Final = nn.initializer.Normal(0.0, 0.02)
"""Initial weights as in transformers."""


class GptLayer(Module):
    """Causal attention and a feed-forward part, each with a norm before it and a residual connection."""

    is_block = True

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden, intermediate, self.heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_heads"]
        linear = partial(nn.Linear, weight_attr=_NORMAL)
        self.attention_norm, self.feed_norm = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, intermediate), linear(intermediate, hidden)
        self.attention = Attention(causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).reshape([batch, length, 3, self.heads, hidden // self.heads])
        x = x + self.out(self.attention(*parts.unbind(2)).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.feed_norm(x)), approximate=True))


class Gpt(Module):
    """Tokens to logits, with learned positions; the output layer is the embedding (Radford et al. 2019, GPT-2)."""

    def __init__(self, sizes: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        self.embedding = nn.Embedding(sizes["vocab_size"], hidden, weight_attr=_NORMAL)
        self.positions = nn.Embedding(sizes["seq_length"], hidden, weight_attr=_NORMAL)
        self.layers = nn.LayerList([GptLayer(sizes, eps) for _ in range(sizes["num_layers"])])
        self.norm = nn.LayerNorm(hidden, eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x = self.embedding(tokens) + self.positions(paddle.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return paddle.matmul(self.norm(x), self.embedding.weight, transpose_y=True)


class Case(DecoderPretraining):
    """GPT-3 6.7B (Brown et al. 2020, arXiv:2005.14165, table 2.1), with dense attention in every layer."""

    shards = "gpt_tokens"
    feed_matrices = 2

    def build_model(self) -> nn.Layer:
        return Gpt(self.sizes, self.real("norm_eps"))
