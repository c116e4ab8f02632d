"""Layers of transformers, whose products :mod:`accelmark.frameworks.paddle.counting` counts."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn


class Attention(nn.Layer):
    """Scaled dot-product attention over queries, keys and values of shape (batch, length, heads, width)."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values of shape (batch, length, heads, width)."""
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p, is_causal=self.causal, training=self.training
        )


class TiedProjection(nn.Layer):
    """Product with the transposed weights of an embedding."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x`` (..., width) times ``weight`` (vocabulary, width): logits (..., vocabulary)."""
        return paddle.matmul(x, weight, transpose_y=True)


class RmsNorm(nn.Layer):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467); Paddle's own has no kernel for the CPU."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input in the type of ``x``; the mean is computed in float32."""
        wide = x.astype("float32")
        return (wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).astype(x.dtype)


def linear(size_in: int, size_out: int, std: float) -> nn.Linear:
    """Return a product without bias, with normal initial weights."""
    return nn.Linear(size_in, size_out, weight_attr=nn.initializer.Normal(0.0, std), bias_attr=False)


def rotary_angles(width: int, length: int) -> dict[str, Tensor]:
    """Return ``cos`` and ``sin`` of rotary embeddings (Su et al. 2021, arXiv:2104.09864), of shape (length, 1, width).

    The sine of the first half is negative; see :func:`rotate`.
    """
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(length), rates)[:, None].astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    both = {"cos": np.concatenate((cos, cos), -1), "sin": np.concatenate((-sin, sin), -1)}
    return {name: paddle.to_tensor(array) for name, array in both.items()}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys of shape (batch, length, heads, width) by their position."""
    return x * cos.astype(x.dtype) + x.roll(x.shape[-1] // 2, -1) * sin.astype(x.dtype)
