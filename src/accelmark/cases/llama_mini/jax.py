"""A small Llama on the bytes of Shakespeare's plays in JAX."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal

from accelmark.cases.llama_mini._array_data import Plays
from accelmark.cases.llama_mini._plays import VOCAB
from accelmark.frameworks.jax.attention import causal_attention
from accelmark.tasks.language.jax import NextToken

_STD = 0.02


class Layer(nnx.Module):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, intermediate: int, heads: int, std: float, dtype: Any, rngs: nnx.Rngs) -> None:
        self.heads = heads
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(nnx.RMSNorm, hidden, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.attention_norm, self.feed_norm = norm(), norm()
        self.qkv = linear(hidden, 3 * hidden, kernel_init=normal(_STD))
        self.out = linear(hidden, hidden, kernel_init=normal(std))
        self.gate_up = linear(hidden, 2 * intermediate, kernel_init=normal(_STD))
        self.down = linear(intermediate, hidden, kernel_init=normal(std))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        width = hidden // self.heads
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, length, 3, self.heads, width)
        query, key, value = (qkv[:, :, part] for part in range(3))
        query = query * cos + jnp.roll(query, width // 2, -1) * sin
        key = key * cos + jnp.roll(key, width // 2, -1) * sin
        mixed = causal_attention(query, key, value)
        x = x + self.out(mixed.reshape(batch, length, hidden))
        gate, up = jnp.split(self.gate_up(self.feed_norm(x)), 2, -1)
        fed: jax.Array = self.down(nnx.silu(gate) * up)
        return x + fed


class LlamaMini(nnx.Module):
    """Decoder with an untied output layer: tokens to logits (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, *, hidden: int, intermediate: int, layers: int, heads: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.width, self.dtype = hidden // heads, dtype
        self.embedding = nnx.Embed(VOCAB, hidden, embedding_init=normal(_STD), dtype=dtype, rngs=rngs)
        std = _STD / math.sqrt(2 * layers)
        self.layers = nnx.List(Layer(hidden, intermediate, heads, std, dtype, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(hidden, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, VOCAB, use_bias=False, kernel_init=normal(_STD), dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits of shape (batch, length, vocabulary)."""
        rates = 10000.0 ** (-jnp.arange(0, self.width, 2) / self.width)
        angles = jnp.outer(jnp.arange(tokens.shape[1]), rates)[:, None]
        cos = jnp.concatenate((jnp.cos(angles), jnp.cos(angles)), -1).astype(self.dtype)
        sin = jnp.concatenate((-jnp.sin(angles), jnp.sin(angles)), -1).astype(self.dtype)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: jax.Array = self.head(self.norm(x))
        return logits


class Case(Plays, NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the decoder with random weights."""
        return LlamaMini(
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            dtype=self.dtype,
            rngs=rngs,
        )
