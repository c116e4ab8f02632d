"""Prediction of the next token, and pretraining of Llama's architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal

from accelmark.frameworks.jax.attention import causal_attention
from accelmark.frameworks.jax.case import Batch, TrainCase, cross_entropy
from accelmark.tasks.language.arrays import TokenData, TokenShardData


class NextToken(TokenData, TrainCase):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the model returns logits of each."""

    def _losses(self, model: Any, batch: Batch) -> jax.Array:
        tokens = batch[self.tokens].astype(jnp.int32)
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def loss(self, model: Any, batch: Batch) -> jax.Array:
        """Return the mean cross entropy of a token, in nats."""
        return self._losses(model, batch).mean()

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, jax.Array]:
        """Add up the cross entropies of the tokens."""
        losses = self._losses(model, batch)
        return {"loss": losses.sum(), "count": jnp.ones_like(losses).sum()}


_STD: Final = 0.02
"""Standard deviation of the initial weights, as in transformers."""
_BASE: Final = 10000.0
"""Base of the rotary angles."""


class LlamaLayer(nnx.Module):
    """Causal attention with rotary embeddings and a gated feed-forward part, each with a residual connection."""

    def __init__(self, sizes: Mapping[str, int], eps: float, dtype: Any, rngs: nnx.Rngs) -> None:
        hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
        self.width, self.recomputes = hidden // sizes["num_heads"], False
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, kernel_init=normal(_STD), rngs=rngs)
        norm = partial(nnx.RMSNorm, hidden, epsilon=eps, dtype=dtype, rngs=rngs)
        self.attention_norm, self.feed_norm = norm(), norm()
        self.query, self.out = linear(hidden, hidden), linear(hidden, hidden)
        self.key, self.value = (linear(hidden, sizes["num_kv_heads"] * self.width) for _ in range(2))
        self.gate, self.up = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down = linear(intermediate, hidden)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        compute: Any = nnx.remat(LlamaLayer._compute) if self.recomputes else LlamaLayer._compute
        out: jax.Array = compute(self, x, cos, sin)
        return out

    def _compute(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        normed, shape = self.attention_norm(x), (*x.shape[:2], -1, self.width)
        query, key, value = (project(normed).reshape(shape) for project in (self.query, self.key, self.value))
        query, key = (part * cos + jnp.roll(part, self.width // 2, -1) * sin for part in (query, key))
        key, value = (jnp.repeat(part, query.shape[2] // part.shape[2], 2) for part in (key, value))
        x = x + self.out(causal_attention(query, key, value).reshape(x.shape))
        normed = self.feed_norm(x)
        fed: jax.Array = self.down(nnx.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Llama(nnx.Module):
    """Tokens to logits, with an output layer of its own (Touvron et al. 2023, arXiv:2302.13971)."""

    def __init__(self, sizes: Mapping[str, int], eps: float, dtype: Any, rngs: nnx.Rngs) -> None:
        hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
        self.width, self.dtype = hidden // sizes["num_heads"], dtype
        self.embedding = nnx.Embed(vocabulary, hidden, embedding_init=normal(_STD), dtype=dtype, rngs=rngs)
        self.layers = nnx.List(LlamaLayer(sizes, eps, dtype, rngs) for _ in range(sizes["num_layers"]))
        self.norm = nnx.RMSNorm(hidden, epsilon=eps, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, vocabulary, use_bias=False, kernel_init=normal(_STD), dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """Return logits of shape (batch, length, vocabulary), or the mean cross entropy of ``labels``."""
        rates = _BASE ** (-jnp.arange(0, self.width, 2) / self.width)
        angles = jnp.outer(jnp.arange(tokens.shape[1]), rates)[:, None]
        cos = jnp.concatenate((jnp.cos(angles), jnp.cos(angles)), -1).astype(self.dtype)
        sin = jnp.concatenate((-jnp.sin(angles), jnp.sin(angles)), -1).astype(self.dtype)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: jax.Array = self.head(self.norm(x))
        return logits if labels is None else cross_entropy(logits, labels).mean()


class Pretraining(TokenShardData, NextToken):
    """Pretraining of Llama from random weights."""

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Build the decoder with random weights."""
        return Llama(self.sizes, self.real("rms_norm_eps"), self.dtype, rngs)

    def loss(self, model: nnx.Module, batch: Batch) -> jax.Array:
        """Return the mean cross entropy of a token, in nats."""
        tokens = batch[self.tokens].astype(jnp.int32)
        loss: jax.Array = cast("Llama", model)(tokens[:, :-1], tokens[:, 1:])
        return loss
