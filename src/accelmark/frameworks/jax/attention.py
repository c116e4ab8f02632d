"""Causal attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return scaled dot-product attention to earlier positions, for arrays of shape (batch, length, heads, width).

    In fp16, scores are added up in fp32, which ``jax.nn.dot_product_attention`` does not offer on CPUs.
    """
    if query.dtype != jnp.float16:
        mixed: jax.Array = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return mixed
    length = query.shape[1]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tri(length, dtype=bool), scores / math.sqrt(query.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)
