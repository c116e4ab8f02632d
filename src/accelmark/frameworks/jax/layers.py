"""The layers of models in JAX: Flax's, with float32 weights that compute in a given type; images are channels-last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers

List = nnx.List
relu, silu = nnx.relu, nnx.silu
reshape, repeat = jnp.reshape, jnp.repeat
normal = initializers.normal
uniform: Final = initializers.variance_scaling(1 / 3, "fan_in", "uniform")
normal_fan_out: Final = initializers.variance_scaling(2.0, "fan_out", "normal")
"""Initial weights of convolutions before ReLU (He et al. 2015, arXiv:1502.01852)."""
_options: dict[str, Any] = {}
"""Arguments of every layer that is built."""


@contextmanager
def building(seed: int, dtype: Any) -> Iterator[None]:
    """Let layers that are built inside compute in ``dtype``, with initial weights by ``seed``."""
    _options.update(dtype=dtype, rngs=nnx.Rngs(seed))
    try:
        yield
    finally:
        _options.clear()


class Module(nnx.Module):
    """A model or a part of one; ``forward`` computes its outputs."""

    is_block = False
    """Whether activation checkpointing recomputes it in the backward pass."""
    recomputes = False

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of ``forward``."""
        forward: Any = type(self).forward
        return (nnx.remat(forward) if self.recomputes else forward)(self, *inputs)


def Linear(size_in: int, size_out: int, initial: Any, *, bias: Any = None) -> nnx.Linear:  # noqa: N802
    """Return a product with a matrix; a bias starts at zero."""
    return nnx.Linear(size_in, size_out, use_bias=bias is not None, kernel_init=initial, **_options)


def Conv(  # noqa: N802
    channels_in: int, channels_out: int, size: int, initial: Any, stride: int = 1, padding: int = 0
) -> nnx.Conv:
    """Return a convolution without bias."""
    return nnx.Conv(
        channels_in,
        channels_out,
        (size, size),
        stride,
        padding=padding,
        use_bias=False,
        kernel_init=initial,
        **_options,
    )


def BatchNorm(channels: int) -> nnx.BatchNorm:  # noqa: N802
    """Return batch normalization."""
    return nnx.BatchNorm(channels, momentum=0.9, **_options)


def RmsNorm(size: int, eps: float = 1e-5) -> nnx.RMSNorm:  # noqa: N802
    """Return a root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return nnx.RMSNorm(size, epsilon=eps, **_options)


def Embedding(rows: int, width: int, initial: Any) -> nnx.Embed:  # noqa: N802
    """Return a table of vectors."""
    return nnx.Embed(rows, width, embedding_init=initial, **_options)


def Normalize(  # noqa: N802
    mean: float | Sequence[float], std: float | Sequence[float]
) -> Callable[[jax.Array], jax.Array]:
    """Return bytes of shape (batch, channels, height, width) as normalized float32 images with the channels last."""
    means, deviations = np.array(mean, np.float32), np.array(std, np.float32)
    return lambda image: (image.transpose(0, 2, 3, 1).astype(jnp.float32) - means) / deviations


def MaxPool(size: int, stride: int, padding: int) -> Callable[[jax.Array], jax.Array]:  # noqa: N802
    """Return the largest value of each window."""
    return lambda x: nnx.max_pool(x, (size, size), (stride, stride), ((padding, padding),) * 2)


def Rotary(width: int, length: int) -> Callable[[int], tuple[jax.Array, jax.Array]]:  # noqa: N802
    """Return angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864) for heads of a width."""
    dtype = _options["dtype"]

    def angles_of(length: int) -> tuple[jax.Array, jax.Array]:
        """Return cosine and sine of shape (length, 1, width); the sine of the first half is negative."""
        rates = 10000.0 ** (-jnp.arange(0, width, 2) / width)
        angles = jnp.outer(jnp.arange(length), rates)[:, None]
        cos = jnp.concatenate((jnp.cos(angles), jnp.cos(angles)), -1)
        sin = jnp.concatenate((-jnp.sin(angles), jnp.sin(angles)), -1)
        return cos.astype(dtype), sin.astype(dtype)

    return angles_of


class Attention(Module):
    """Scaled dot-product attention; a token sees itself and those before it."""

    def __init__(self, *, causal: Literal[True]) -> None:
        pass

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Return the mixed values; all arrays are of shape (batch, length, heads, width).

        In fp16, scores are added up in fp32, which ``jax.nn.dot_product_attention`` does not offer on CPUs.
        """
        if query.dtype != jnp.float16:
            return jax.nn.dot_product_attention(query, key, value, is_causal=True)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        mask = jnp.tri(query.shape[1], dtype=bool)
        scores = jnp.where(mask, scores / math.sqrt(query.shape[-1]), -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate queries or keys of shape (batch, length, heads, width) by their position."""
    return x * cos + jnp.roll(x, x.shape[-1] // 2, -1) * sin


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Return equal parts of the last dimension."""
    return list(jnp.split(x, parts, -1))


def unbind(x: jax.Array, axis: int) -> list[jax.Array]:
    """Return the slices along a dimension."""
    return [jax.lax.index_in_dim(x, index, axis, keepdims=False) for index in range(x.shape[axis])]


def global_mean(x: jax.Array) -> jax.Array:
    """Return the mean of images over their positions, of shape (batch, channels)."""
    return x.mean((1, 2))


def neighbours(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return all tokens but the last, and the token after each, of (batch, length + 1) tokens of any integer type."""
    wide = tokens.astype(jnp.int32)
    return wide[:, :-1], wide[:, 1:]


def cross_entropy(logits: jax.Array, labels: jax.Array, reduction: str = "mean") -> jax.Array:
    """Return the ``mean`` or the ``sum`` of the labels' cross entropies, computed in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return losses.mean() if reduction == "mean" else losses.sum()


def num_correct(logits: jax.Array, labels: jax.Array, best: Mapping[str, int]) -> dict[str, jax.Array]:
    """Return, for each metric, how many labels are among so many ``best`` classes."""
    _, classes = jax.lax.top_k(logits, min(max(best.values()), logits.shape[-1]))
    correct = classes == labels[:, None]
    return {name: correct[:, :count].sum() for name, count in best.items()}
