"""A small Llama on the bytes of Shakespeare's plays in Paddle."""

from __future__ import annotations

import math
from typing import Final

import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.cases.llama_mini._array_data import Plays
from accelmark.cases.llama_mini._plays import VOCAB
from accelmark.frameworks.paddle.layers import Attention, RmsNorm, linear, rotary_angles, rotate
from accelmark.tasks.language.paddle import NextToken

_STD: Final = 0.02


class Layer(nn.Layer):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, intermediate: int, heads: int, std: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.qkv, self.out = linear(hidden, 3 * hidden, _STD), linear(hidden, hidden, std)
        self.gate_up, self.down = linear(hidden, 2 * intermediate, _STD), linear(intermediate, hidden, std)
        self.attention = Attention(causal=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        width = hidden // self.heads
        query, key, value = self.qkv(self.attention_norm(x)).reshape([batch, length, 3, self.heads, width]).unbind(2)
        mixed = self.attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.out(mixed.reshape([batch, length, hidden]))
        gate, up = self.gate_up(self.feed_norm(x)).split(2, -1)
        return x + self.down(F.silu(gate) * up)


class LlamaMini(nn.Layer):
    """Decoder with an untied output layer: tokens to logits (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, *, hidden: int, intermediate: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden, weight_attr=nn.initializer.Normal(0.0, _STD))
        std = _STD / math.sqrt(2 * layers)
        self.layers = nn.LayerList([Layer(hidden, intermediate, heads, std) for _ in range(layers)])
        self.norm = RmsNorm(hidden)
        self.head = linear(hidden, VOCAB, _STD)
        for name, angles in rotary_angles(hidden // heads, length).items():
            self.register_buffer(name, angles, persistable=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class Case(Plays, NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    block_class = "Layer"

    def build_model(self) -> nn.Layer:
        """Build the decoder with random weights."""
        return LlamaMini(
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            length=self.number("seq_length"),
        )
