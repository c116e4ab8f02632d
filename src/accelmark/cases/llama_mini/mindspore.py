"""A small Llama on the bytes of Shakespeare's plays in MindSpore."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from mindspore import Tensor, nn, ops

from accelmark.cases.llama_mini._array_data import Plays
from accelmark.cases.llama_mini._plays import VOCAB
from accelmark.frameworks.mindspore.layers import CausalAttention, RmsNorm, embedding, linear, rotary_angles, rotate
from accelmark.tasks.language.mindspore import NextToken
from accelmark.train.initial_weights import normal

_STD: Final = 0.02


class Layer(nn.Cell):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, intermediate: int, heads: int, std: float, random: np.random.Generator) -> None:
        super().__init__()
        self.heads = heads
        small, smaller = normal(random, _STD), normal(random, std)
        self.attention_norm, self.feed_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.qkv, self.out = linear(hidden, 3 * hidden, small), linear(hidden, hidden, smaller)
        self.gate_up, self.down = linear(hidden, 2 * intermediate, small), linear(intermediate, hidden, smaller)
        self.attention = CausalAttention()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = ops.unbind(qkv.transpose(2, 0, 3, 1, 4), 0)
        mixed = self.attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, length, hidden))
        gate, up = ops.chunk(self.gate_up(self.feed_norm(x)), 2, -1)
        return x + self.down(ops.silu(gate) * up)


class LlamaMini(nn.Cell):
    """Decoder with an untied output layer: tokens to logits (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(
        self, *, hidden: int, intermediate: int, layers: int, heads: int, length: int, random: np.random.Generator
    ) -> None:
        super().__init__()
        self.embedding = embedding(VOCAB, hidden, normal(random, _STD))
        std = _STD / math.sqrt(2 * layers)
        self.layers = nn.CellList([Layer(hidden, intermediate, heads, std, random) for _ in range(layers)])
        self.norm, self.head = RmsNorm(hidden), linear(hidden, VOCAB, normal(random, _STD))
        self.cos, self.sin = rotary_angles(hidden // heads, length)

    def construct(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        cos, sin = self.cos.narrow(0, 0, length), self.sin.narrow(0, 0, length)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Case(Plays, NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    def build_model(self, random: np.random.Generator) -> nn.Cell:
        """Build the decoder with random weights."""
        return LlamaMini(
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            length=self.number("seq_length"),
            random=random,
        )
