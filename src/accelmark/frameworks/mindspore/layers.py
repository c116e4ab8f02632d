"""Layers with given initial weights; images have the channels first."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from accelmark.train.initial_weights import Initial, normal


def normal_fan_out(random: np.random.Generator) -> Initial:
    """Return normal initial weights of convolutions before ReLU, by the number of outputs of each input.

    He et al. 2015, arXiv:1502.01852.
    """
    return lambda shape, fan_in: normal(random, math.sqrt(2 / (shape[0] * math.prod(shape[2:]))))(shape, fan_in)


def linear(size_in: int, size_out: int, initial: Initial, *, bias: bool = False) -> nn.Dense:
    """Return a product with a matrix of shape (out, in)."""
    weight = Tensor(initial((size_out, size_in), size_in))
    if not bias:
        return nn.Dense(size_in, size_out, weight_init=weight, has_bias=False)
    return nn.Dense(size_in, size_out, weight_init=weight, bias_init=Tensor(initial((size_out,), size_in)))


def convolution(
    channels_in: int, channels_out: int, size: int, initial: Initial, stride: int = 1, padding: int = 0
) -> nn.Conv2d:
    """Return a convolution of (batch, channels, height, width) without bias."""
    weight = Tensor(initial((channels_out, channels_in, size, size), channels_in * size**2))
    return nn.Conv2d(
        channels_in, channels_out, size, stride, pad_mode="pad", padding=padding, has_bias=False, weight_init=weight
    )


def embedding(vocabulary: int, width: int, initial: Initial) -> nn.Embedding:
    """Return a table of vectors."""
    return nn.Embedding(vocabulary, width, embedding_table=Tensor(initial((vocabulary, width), vocabulary)))


class RmsNorm(nn.Cell):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(Tensor(np.ones(size, np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        """Return the scaled input in the type of ``x``."""
        wide = x.astype(ms.float32)
        return (wide * ops.rsqrt(ops.square(wide).mean(-1, True) + self.eps) * self.weight).astype(x.dtype)


class CausalAttention(nn.Cell):
    """Scaled dot-product attention over queries, keys and values of shape (batch, heads, length, width)."""

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values; a token sees itself and those before it. Scores are normalised in float32."""
        length, width = query.shape[-2:]
        scores = ops.matmul(query, key.swapaxes(-1, -2)).astype(ms.float32) / math.sqrt(width)
        hidden = ops.triu(ops.ones((length, length), ms.float32), 1) * -1e9
        return ops.matmul(ops.softmax(scores + hidden, -1).astype(value.dtype), value)


def rotary_angles(width: int, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of rotary embeddings (Su et al. 2021, arXiv:2104.09864), of shape (length, width).

    The sine of the first half is negative; see :func:`rotate`.
    """
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(length), rates).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    return Tensor(np.concatenate((cos, cos), -1)), Tensor(np.concatenate((-sin, sin), -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys of shape (batch, heads, length, width) by their position."""
    first, second = ops.chunk(x, 2, -1)
    swapped = ops.cat((second, first), -1)
    return x * cos.astype(x.dtype) + swapped * sin.astype(x.dtype)
