"""A small Llama on the bytes of Shakespeare's plays in TensorFlow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from accelmark.cases.llama_mini._array_data import Plays
from accelmark.cases.llama_mini._plays import VOCAB
from accelmark.frameworks.tensorflow.layers import Embedding, Linear, RmsNorm, causal_attention
from accelmark.tasks.language.tensorflow import NextToken
from accelmark.train.initial_weights import normal

_STD = 0.02


class Layer(tf.Module):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, std: float, dtype: Any, random: np.random.Generator
    ) -> None:
        super().__init__()
        self.heads = heads
        small, smaller = normal(random, _STD), normal(random, std)
        self.attention_norm, self.feed_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.qkv, self.out = Linear(hidden, 3 * hidden, small, dtype), Linear(hidden, hidden, smaller, dtype)
        self.gate_up = Linear(hidden, 2 * intermediate, small, dtype)
        self.down = Linear(intermediate, hidden, smaller, dtype)

    def __call__(self, x: Any, cos: Any, sin: Any) -> Any:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        width = hidden // self.heads
        qkv = tf.reshape(self.qkv(self.attention_norm(x)), (batch, length, 3, self.heads, width))
        query, key, value = tf.unstack(qkv, axis=2)
        query = query * cos + tf.roll(query, width // 2, -1) * sin
        key = key * cos + tf.roll(key, width // 2, -1) * sin
        mixed = causal_attention(query, key, value)
        x = x + self.out(tf.reshape(mixed, (batch, length, hidden)))
        gate, up = tf.split(self.gate_up(self.feed_norm(x)), 2, -1)
        return x + self.down(tf.nn.silu(gate) * up)


class LlamaMini(tf.Module):
    """Decoder with an untied output layer: tokens to logits (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(
        self, *, hidden: int, intermediate: int, layers: int, heads: int, dtype: Any, random: np.random.Generator
    ) -> None:
        super().__init__()
        self.width, self.dtype = hidden // heads, dtype
        self.embedding = Embedding(VOCAB, hidden, normal(random, _STD), dtype)
        std = _STD / math.sqrt(2 * layers)
        self.layers = [Layer(hidden, intermediate, heads, std, dtype, random) for _ in range(layers)]
        self.norm, self.head = RmsNorm(hidden), Linear(hidden, VOCAB, normal(random, _STD), dtype)

    def __call__(self, tokens: Any) -> Any:
        """Return logits of shape (batch, length, vocabulary)."""
        rates = 10000.0 ** (-np.arange(0, self.width, 2) / self.width)
        angles = np.outer(np.arange(tokens.shape[1]), rates)[:, None]
        cos = tf.constant(np.concatenate((np.cos(angles), np.cos(angles)), -1), self.dtype)
        sin = tf.constant(np.concatenate((-np.sin(angles), np.sin(angles)), -1), self.dtype)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Case(Plays, NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    def build_model(self, random: np.random.Generator) -> tf.Module:
        """Build the decoder with random weights."""
        return LlamaMini(
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            dtype=self.dtype,
            random=random,
        )
