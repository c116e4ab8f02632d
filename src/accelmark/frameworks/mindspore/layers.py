"""The layers of models in MindSpore; images have the channels first.

Functions are captured from bytecode, which fails for functions that index or slice a tensor with ``[]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from accelmark.train.case import IGNORED, Initial, normal, normal_fan_out, rotary_angles, uniform, zeros

__all__ = ["normal", "normal_fan_out", "uniform", "zeros"]

List = nn.CellList
gelu, relu, silu = ops.gelu, ops.relu, ops.silu
arange, reshape = ops.arange, ops.reshape
unbind = ops.unbind
_random: list[np.random.Generator] = []
_dropouts: list[Any] = []
_MIX: Final = ((16, -2048144789), (13, -1028477387))
"""Shifts and factors of MurmurHash3's last steps (Appleby, smhasher), whose factors are 0x85ebca6b and 0xc2b2ae35."""
_SPREAD: Final = -1640531527
"""2**32 divided by the golden ratio, as int32."""


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Let layers that are built inside have initial weights by ``seed``."""
    _random.append(np.random.default_rng(seed))
    try:
        yield
    finally:
        _random.clear()
        _dropouts.clear()


class Module(nn.Cell):
    """A model or a part of one; ``forward`` computes its outputs."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.construct = cls.forward


def Linear(size_in: int, size_out: int, initial: Initial, *, bias: Initial | None = None) -> nn.Dense:  # noqa: N802
    """Return a product with a matrix of shape (out, in)."""
    weight = Tensor(initial(_random[0], (size_out, size_in), size_in, size_out))
    if bias is None:
        return nn.Dense(size_in, size_out, weight_init=weight, has_bias=False)
    start = Tensor(bias(_random[0], (size_out,), size_in, size_out))
    return nn.Dense(size_in, size_out, weight_init=weight, bias_init=start)


def Conv(  # noqa: N802
    channels_in: int, channels_out: int, size: int, initial: Initial, stride: int = 1, padding: int = 0
) -> nn.Conv2d:
    """Return a convolution without bias."""
    shape = channels_out, channels_in, size, size
    weight = Tensor(initial(_random[0], shape, channels_in * size**2, channels_out * size**2))
    return nn.Conv2d(
        channels_in, channels_out, size, stride, pad_mode="pad", padding=padding, has_bias=False, weight_init=weight
    )


def BatchNorm(channels: int) -> nn.BatchNorm2d:  # noqa: N802
    """Return batch normalization."""
    return nn.BatchNorm2d(channels)


class RmsNorm(Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(Tensor(np.ones(size, np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input in the type of ``x``."""
        wide = x.astype(ms.float32)
        return (wide * ops.rsqrt(ops.square(wide).mean(-1, True) + self.eps) * self.weight).astype(x.dtype)


def LayerNorm(size: int, eps: float = 1e-5) -> nn.LayerNorm:  # noqa: N802
    """Return layer normalization (Ba et al. 2016, arXiv:1607.06450)."""
    return nn.LayerNorm((size,), epsilon=eps)


class Dropout(Module):
    """Zeros for a share of the values while training.

    Which, follows from ``seed``, this layer's number among those of the model, and a value's place: MindSpore's own
    generators cannot be set to a state in which they drew before.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        if rate:
            self.seed = (
                _dropouts[0].seed if _dropouts else Parameter(Tensor(np.zeros(2, np.int32)), requires_grad=False)
            )
            self.number = len(_dropouts)
            _dropouts.append(self)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return x
        first, second = ops.unstack(self.seed)
        bits = _mixed(ops.arange(x.size, dtype=ms.int32) * _SPREAD + first)
        bits = _mixed(ops.bitwise_xor(bits, second + self.number * _SPREAD))
        kept = ops.reshape(bits >= int(self.rate * 2**31), x.shape)
        return x * kept.astype(x.dtype) / (1 - self.rate)


def _mixed(bits: Tensor) -> Tensor:
    """Return int32 from 0 whose bits depend on all bits of ``bits``; a shifted int32 keeps its sign."""
    for shift, factor in _MIX:
        bits = ops.bitwise_xor(bits, ops.bitwise_right_shift(bits, shift)) * factor
    return ops.bitwise_xor(bits, ops.bitwise_right_shift(bits, 16))


def Embedding(rows: int, width: int, initial: Initial) -> nn.Embedding:  # noqa: N802
    """Return a table of vectors."""
    return nn.Embedding(rows, width, embedding_table=Tensor(initial(_random[0], (rows, width), rows, width)))


class TiedHead(Module):
    """Logits by the table of an embedding, with a bias of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = Parameter(Tensor(np.zeros(size, np.float32)))

    def forward(self, x: Tensor, embedding: nn.Embedding) -> Tensor:
        """Return logits of shape (..., rows of the table)."""
        return ops.matmul(x, embedding.embedding_table.swapaxes(0, 1)) + self.bias


def Normalize(  # noqa: N802
    mean: float | Sequence[float], std: float | Sequence[float]
) -> Callable[[Tensor], Tensor]:
    """Return bytes of shape (batch, channels, height, width) as normalized float32 images."""
    means, deviations = (
        values if isinstance(values, float) else Tensor(np.array(values, np.float32).reshape(-1, 1, 1))
        for values in (mean, std)
    )
    return lambda image: (image.astype(ms.float32) - means) / deviations


def MaxPool(size: int, stride: int, padding: int) -> nn.MaxPool2d:  # noqa: N802
    """Return the largest value of each window."""
    return nn.MaxPool2d(size, stride, pad_mode="pad", padding=padding)


def Rotary(width: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:  # noqa: N802
    """Return angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864) for heads of a width.

    They are cosine and sine of shape (length, 1, width); the sine of the first half is negative.
    """
    cos, sin = map(Tensor, rotary_angles(width, length))
    return lambda length: (cos.narrow(0, 0, length), sin.narrow(0, 0, length))


class Attention(Module):
    """Scaled dot-product attention; if ``causal``, a token sees itself and those before it. Scores are in float32."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mixed values of shape (batch, length, heads, width); ``mask`` is true where a token is seen."""
        query, key, value = query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2)
        length, width = query.shape[-2:]
        scores = ops.matmul(query, key.swapaxes(-1, -2)).astype(ms.float32) / math.sqrt(width)
        if self.causal:
            scores = scores + ops.triu(ops.ones((length, length), ms.float32), 1) * -1e9
        elif mask is not None:
            scores = scores + (1 - mask.astype(ms.float32)) * -1e9
        return ops.matmul(self.dropout(ops.softmax(scores, -1)).astype(value.dtype), value).swapaxes(1, 2)


def padding_mask(num_tokens: Tensor, length: int) -> Tensor:
    """Return a mask of the tokens before the padding, of shape (batch, 1, 1, length)."""
    return ops.arange(length) < num_tokens.reshape(-1, 1, 1, 1)


def at_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Return the vectors of ``x`` (batch, length, width) at positions of shape (batch, number)."""
    return ops.gather(x, positions, 1, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys of shape (batch, length, heads, width) by their position."""
    first, second = ops.chunk(x, 2, -1)
    return x * cos.astype(x.dtype) + ops.cat((second, first), -1) * sin.astype(x.dtype)


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """Repeat each slice along a dimension."""
    return ops.repeat_interleave(x, times, axis) if times > 1 else x


def split(x: Tensor, parts: int) -> Any:
    """Return equal parts of the last dimension."""
    return ops.chunk(x, parts, -1)


def global_mean(x: Tensor) -> Tensor:
    """Return the mean of images over their positions, of shape (batch, channels)."""
    return x.mean((2, 3))


def neighbours(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all tokens but the last, and the token after each, of (batch, length + 1) tokens of any integer type."""
    wide, length = tokens.astype(ms.int32), tokens.shape[1] - 1
    return wide.narrow(1, 0, length), wide.narrow(1, 1, length)


def num_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that are not to be ignored."""
    return (labels != IGNORED).astype(ms.float32).sum()


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the ``mean`` or the ``sum`` of the labels' cross entropies, computed in float32."""
    flat = logits.reshape(-1, logits.shape[-1]).astype(ms.float32)
    flat_labels = labels.reshape(-1).astype(ms.int32)
    return ops.cross_entropy(flat, flat_labels, ignore_index=IGNORED, reduction=reduction)


def num_correct(logits: Tensor, labels: Tensor, best: Mapping[str, int]) -> dict[str, Tensor]:
    """Return, for each metric, how many labels are among so many ``best`` classes."""
    _, classes = ops.topk(logits.astype(ms.float32), min(max(best.values()), logits.shape[-1]))
    correct = (classes == labels.astype(ms.int32).reshape(-1, 1)).astype(ms.float32)
    width = correct.shape[-1]
    return {name: correct.narrow(1, 0, min(count, width)).sum() for name, count in best.items()}
