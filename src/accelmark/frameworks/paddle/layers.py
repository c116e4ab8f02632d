"""The layers of models in Paddle; those of transformers are written here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn

from accelmark.train.case import IGNORED, rotary_angles

Initial = Callable[[int, int], Any]
"""Returns the initializer of weights, by the number of inputs of each output and of outputs of each input."""
List = nn.LayerList
gelu, relu, silu = F.gelu, F.relu, F.silu
arange, reshape = paddle.arange, paddle.reshape
Dropout = nn.Dropout
_layout: dict[str, str] = {"data_format": "NCHW"}


@contextmanager
def building(*, channels_last: bool) -> Iterator[None]:
    """Let layers that are built inside keep images in a layout; there is one model in a process."""
    _layout["data_format"] = "NHWC" if channels_last else "NCHW"
    with paddle.utils.unique_name.guard():  # parameters are numbered from 0
        yield


class Module(nn.Layer):
    """A model or a part of one; ``forward`` computes its outputs."""

    is_block = False
    """Whether activation checkpointing recomputes it in the backward pass."""


def normal(std: float) -> Initial:
    """Return normal initial weights."""
    return lambda fan_in, fan_out: nn.initializer.Normal(0.0, std)


def zeros(fan_in: int, fan_out: int) -> Any:
    """Return zeros."""
    return nn.initializer.Constant(0.0)


def uniform(fan_in: int, fan_out: int) -> Any:
    """Return PyTorch's initial weights of convolutions and linear layers."""
    return nn.initializer.Uniform(-(fan_in**-0.5), fan_in**-0.5)


def normal_fan_out(fan_in: int, fan_out: int) -> Any:
    """Return normal initial weights of convolutions before ReLU (He et al. 2015, arXiv:1502.01852)."""
    return nn.initializer.Normal(0.0, (2 / fan_out) ** 0.5)


def Linear(  # noqa: N802
    size_in: int, size_out: int, initial: Initial, *, bias: Initial | None = None
) -> nn.Linear:
    """Return a product with a matrix."""
    biases = False if bias is None else bias(size_in, size_out)
    return nn.Linear(size_in, size_out, weight_attr=initial(size_in, size_out), bias_attr=biases)


def Conv(  # noqa: N802
    channels_in: int, channels_out: int, size: int, initial: Initial, stride: int = 1, padding: int = 0
) -> nn.Conv2D:
    """Return a convolution without bias."""
    weights = initial(channels_in * size**2, channels_out * size**2)
    return nn.Conv2D(channels_in, channels_out, size, stride, padding, weight_attr=weights, bias_attr=False, **_layout)


def BatchNorm(channels: int) -> nn.BatchNorm2D:  # noqa: N802
    """Return batch normalization."""
    return nn.BatchNorm2D(channels, **_layout)


class RmsNorm(Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467); Paddle's own has no kernel for the CPU."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input in the type of ``x``; the mean is computed in float32."""
        wide = x.astype("float32")
        return (wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).astype(x.dtype)


def LayerNorm(size: int, eps: float = 1e-5) -> nn.LayerNorm:  # noqa: N802
    """Return layer normalization (Ba et al. 2016, arXiv:1607.06450)."""
    return nn.LayerNorm(size, eps)


def Embedding(rows: int, width: int, initial: Initial) -> nn.Embedding:  # noqa: N802
    """Return a table of vectors."""
    return nn.Embedding(rows, width, weight_attr=initial(rows, width))


class TiedHead(Module):
    """Logits by the table of an embedding, with a bias of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = self.create_parameter([size], is_bias=True)

    def forward(self, x: Tensor, embedding: nn.Embedding) -> Tensor:
        """Return logits of shape (..., rows of the table)."""
        return paddle.matmul(x, embedding.weight, transpose_y=True) + self.bias


def Normalize(  # noqa: N802
    mean: float | Sequence[float], std: float | Sequence[float]
) -> Callable[[Tensor], Tensor]:
    """Return bytes of shape (batch, channels, height, width) as normalized float32 images in the layers' layout."""
    means, deviations = (
        values if isinstance(values, float) else paddle.to_tensor(np.array(values, np.float32).reshape(1, -1, 1, 1))
        for values in (mean, std)
    )

    def normalize(image: Tensor) -> Tensor:
        x = (image.astype("float32") - means) / deviations
        return x.transpose([0, 2, 3, 1]) if _layout["data_format"] == "NHWC" else x

    return normalize


def MaxPool(size: int, stride: int, padding: int) -> nn.MaxPool2D:  # noqa: N802
    """Return the largest value of each window."""
    return nn.MaxPool2D(size, stride, padding, **_layout)


def Rotary(width: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:  # noqa: N802
    """Return angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864) for heads of a width.

    They are cosine and sine of shape (length, 1, width); the sine of the first half is negative.
    """
    cos, sin = map(paddle.to_tensor, rotary_angles(width, length))
    return lambda length: (cos[:length], sin[:length])


class Attention(Module):
    """Scaled dot-product attention over queries, keys and values of shape (batch, length, heads, width)."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mixed values of shape (batch, length, heads, width); ``mask`` is true where a token is seen."""
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=self.dropout.p, is_causal=self.causal, training=self.training
        )


def padding_mask(num_tokens: Tensor, length: int) -> Tensor:
    """Return a mask of the tokens before the padding, of shape (batch, 1, 1, length)."""
    return (paddle.arange(length) < num_tokens.unsqueeze(-1)).unsqueeze([1, 2])


def at_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Return the vectors of ``x`` (batch, length, width) at positions of shape (batch, number)."""
    return paddle.take_along_axis(x, positions.unsqueeze(-1), 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys of shape (batch, length, heads, width) by their position."""
    return x * cos.astype(x.dtype) + x.roll(x.shape[-1] // 2, -1) * sin.astype(x.dtype)


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """Repeat each slice along a dimension."""
    return x.repeat_interleave(times, axis) if times > 1 else x


def split(x: Tensor, parts: int) -> list[Tensor]:
    """Return equal parts of the last dimension."""
    return list(x.split(parts, -1))


def unbind(x: Tensor, axis: int) -> list[Tensor]:
    """Return the slices along a dimension."""
    return list(x.unbind(axis))


def global_mean(x: Tensor) -> Tensor:
    """Return the mean of images over their positions, of shape (batch, channels)."""
    return x.mean([1, 2] if _layout["data_format"] == "NHWC" else [2, 3])


def neighbours(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all tokens but the last, and the token after each, of (batch, length + 1) tokens of any integer type."""
    wide = tokens.astype("int64")
    return wide[:, :-1], wide[:, 1:]


def num_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that are not to be ignored."""
    return (labels != IGNORED).sum()


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the ``mean`` or the ``sum`` of the labels' cross entropies, computed in float32."""
    flat = logits.reshape([-1, logits.shape[-1]]).astype("float32")
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def num_correct(logits: Tensor, labels: Tensor, best: Mapping[str, int]) -> dict[str, Tensor]:
    """Return, for each metric, how many labels are among so many ``best`` classes."""
    _, classes = logits.astype("float32").topk(min(max(best.values()), logits.shape[-1]))
    correct = classes == labels[:, None]
    return {name: correct[:, :count].sum() for name, count in best.items()}
