"""The layers of models in TensorFlow, with float32 weights that compute in a given type; images are channels-last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from accelmark.train.case import IGNORED, Initial, normal, normal_fan_out, uniform, zeros

__all__ = ["normal", "normal_fan_out", "uniform", "zeros"]

List = list
gelu, relu, silu = tf.nn.gelu, tf.nn.relu, tf.nn.silu
arange, reshape, repeat = tf.range, tf.reshape, tf.repeat
_options: dict[str, Any] = {}
_drawing: dict[str, Any] = {}


@contextmanager
def building(seed: int, dtype: Any) -> Iterator[None]:
    """Let layers that are built inside compute in ``dtype``, with initial weights by ``seed``."""
    _options.update(dtype=dtype, random=np.random.default_rng(seed))
    try:
        yield
    finally:
        _options.clear()


@contextmanager
def drawing(seed: Any) -> Iterator[None]:
    """Let dropout that is traced inside draw its numbers by ``seed``, two int32, each layer others."""
    _drawing.update(seed=seed, count=0)
    try:
        yield
    finally:
        _drawing.clear()


def _initial(initial: Initial, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Any:
    return tf.Variable(initial(_options["random"], shape, fan_in, fan_out))


class Module(tf.Module):
    """A model or a part of one; ``forward`` computes its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = _options["dtype"]

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of ``forward``."""
        return self.forward(*inputs)


class Linear(Module):
    """A product with a matrix."""

    def __init__(self, size_in: int, size_out: int, initial: Initial, *, bias: Initial | None = None) -> None:
        super().__init__()
        self.kernel = _initial(initial, (size_in, size_out), size_in, size_out)
        self.is_biased = bias is not None
        if bias is not None:
            self.bias = _initial(bias, (size_out,), size_in, size_out)

    def forward(self, x: Any) -> Any:
        """Return ``x`` of shape (..., in) times the matrix."""
        flat = tf.reshape(tf.cast(x, self.dtype), (-1, self.kernel.shape[0]))
        out = tf.reshape(tf.matmul(flat, tf.cast(self.kernel, self.dtype)), (*x.shape[:-1], self.kernel.shape[1]))
        return out + tf.cast(self.bias, self.dtype) if self.is_biased else out


class Conv(Module):
    """A convolution without bias."""

    def __init__(
        self, channels_in: int, channels_out: int, size: int, initial: Initial, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__()
        self.stride, self.padding = stride, [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        shape = size, size, channels_in, channels_out
        self.kernel = _initial(initial, shape, channels_in * size**2, channels_out * size**2)

    def forward(self, x: Any) -> Any:
        return tf.nn.conv2d(tf.cast(x, self.dtype), tf.cast(self.kernel, self.dtype), self.stride, self.padding)


class BatchNorm(Module):
    """Batch normalization over the last dimension, with the statistics of this rank's batch while training."""

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.training, self.momentum, self.eps = True, momentum, eps
        self.weight, self.bias = tf.Variable(tf.ones(channels)), tf.Variable(tf.zeros(channels))
        self.running_mean = tf.Variable(tf.zeros(channels), trainable=False)
        self.running_var = tf.Variable(tf.ones(channels), trainable=False)

    def forward(self, x: Any) -> Any:
        """Return the normalized input; training moves the running statistics."""
        normed = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=self.weight,
            offset=self.bias,
            mean=self.running_mean,
            variance=self.running_var,
            epsilon=self.eps,
            exponential_avg_factor=self.momentum,
            is_training=self.training,
        )
        if self.training:
            self.running_mean.assign(normed.batch_mean)
            self.running_var.assign(normed.batch_variance)
        return normed.y


class RmsNorm(Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, tf.Variable(tf.ones(size))

    def forward(self, x: Any) -> Any:
        """Return the scaled input in the type of ``x``; the mean is computed in float32."""
        wide = tf.cast(x, tf.float32)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, keepdims=True) + self.eps)
        return tf.cast(wide * scale * self.weight, x.dtype)


class LayerNorm(Module):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450), computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = eps, tf.Variable(tf.ones(size)), tf.Variable(tf.zeros(size))

    def forward(self, x: Any) -> Any:
        """Return the normalized input in the type of ``x``."""
        wide = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(wide, -1, keepdims=True)
        return tf.cast((wide - mean) * tf.math.rsqrt(variance + self.eps) * self.weight + self.bias, x.dtype)


class Dropout(Module):
    """Zeros for a share of the values while training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.training, self.rate = True, rate

    def forward(self, x: Any) -> Any:
        if not (self.training and self.rate):
            return x
        _drawing["count"] += 1
        seed = tf.random.experimental.stateless_fold_in(_drawing["seed"], _drawing["count"])
        kept = tf.random.stateless_uniform(tf.shape(x), seed) >= self.rate
        return tf.where(kept, x / tf.cast(1 - self.rate, x.dtype), tf.zeros((), x.dtype))


class Embedding(Module):
    """A table of vectors."""

    def __init__(self, rows: int, width: int, initial: Initial) -> None:
        super().__init__()
        self.weight = _initial(initial, (rows, width), rows, width)

    def forward(self, tokens: Any) -> Any:
        """Return the rows of ``tokens``, of shape (..., width)."""
        return tf.cast(tf.gather(self.weight, tokens), self.dtype)


class TiedHead(Module):
    """Logits by the table of an embedding, with a bias of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = tf.Variable(tf.zeros(size))

    def forward(self, x: Any, embedding: Embedding) -> Any:
        """Return logits of shape (..., rows of the table)."""
        table = tf.cast(embedding.weight, self.dtype)
        flat = tf.matmul(tf.reshape(tf.cast(x, self.dtype), (-1, x.shape[-1])), table, transpose_b=True)
        return tf.reshape(flat, (*x.shape[:-1], table.shape[0])) + tf.cast(self.bias, self.dtype)


def Normalize(  # noqa: N802
    mean: float | Sequence[float], std: float | Sequence[float]
) -> Callable[[Any], Any]:
    """Return bytes of shape (batch, channels, height, width) as normalized float32 images with the channels last."""
    means, deviations = np.array(mean, np.float32), np.array(std, np.float32)
    return lambda image: (tf.cast(tf.transpose(image, (0, 2, 3, 1)), tf.float32) - means) / deviations


def MaxPool(size: int, stride: int, padding: int) -> Callable[[Any], Any]:  # noqa: N802
    """Return the largest value of each window."""
    paddings = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    return lambda x: tf.nn.max_pool2d(x, size, stride, paddings)


def Rotary(width: int, length: int) -> Callable[[int], tuple[Any, Any]]:  # noqa: N802
    """Return angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864) for heads of a width."""
    dtype = _options["dtype"]

    def angles_of(length: int) -> tuple[Any, Any]:
        """Return cosine and sine of shape (length, 1, width); the sine of the first half is negative."""
        rates = 10000.0 ** (-np.arange(0, width, 2) / width)
        angles = np.outer(np.arange(length), rates)[:, None]
        cos = tf.constant(np.concatenate((np.cos(angles), np.cos(angles)), -1), dtype)
        return cos, tf.constant(np.concatenate((-np.sin(angles), np.sin(angles)), -1), dtype)

    return angles_of


class Attention(Module):
    """Scaled dot-product attention; if ``causal``, a token sees itself and those before it. Scores are in float32."""

    def __init__(self, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, Dropout(dropout)

    def forward(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        """Return the mixed values of shape (batch, length, heads, width); ``mask`` is true where a token is seen."""
        length, width = query.shape[1], query.shape[-1]
        scores = tf.cast(tf.einsum("btnh,bsnh->bnts", query, key), tf.float32) * width**-0.5
        mask = np.tri(length, dtype=bool) if self.causal else mask
        weights = tf.nn.softmax(scores if mask is None else tf.where(mask, scores, -np.inf))
        return tf.einsum("bnts,bsnh->btnh", self.dropout(tf.cast(weights, value.dtype)), value)


def padding_mask(num_tokens: Any, length: int) -> Any:
    """Return a mask of the tokens before the padding, of shape (batch, 1, 1, length)."""
    return tf.sequence_mask(num_tokens, length)[:, None, None]


def at_positions(x: Any, positions: Any) -> Any:
    """Return the vectors of ``x`` (batch, length, width) at positions of shape (batch, number)."""
    return tf.gather(x, positions, batch_dims=1)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate queries or keys of shape (batch, length, heads, width) by their position."""
    return x * cos + tf.roll(x, x.shape[-1] // 2, -1) * sin


def split(x: Any, parts: int) -> list[Any]:
    """Return equal parts of the last dimension."""
    return list(tf.split(x, parts, -1))


def unbind(x: Any, axis: int) -> list[Any]:
    """Return the slices along a dimension."""
    return list(tf.unstack(x, axis=axis))


def global_mean(x: Any) -> Any:
    """Return the mean of images over their positions, of shape (batch, channels)."""
    return tf.reduce_mean(x, (1, 2))


def neighbours(tokens: Any) -> tuple[Any, Any]:
    """Return all tokens but the last, and the token after each, of (batch, length + 1) tokens of any integer type."""
    wide = tf.cast(tokens, tf.int32)
    return wide[:, :-1], wide[:, 1:]


def num_labels(labels: Any) -> Any:
    """Return the number of labels that are not to be ignored."""
    return tf.math.count_nonzero(labels != IGNORED, dtype=tf.int32)


def cross_entropy(logits: Any, labels: Any, reduction: str = "mean") -> Any:
    """Return the ``mean`` or the ``sum`` of the labels' cross entropies, computed in float32."""
    seen = labels != IGNORED
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(seen, labels, 0), tf.cast(logits, tf.float32))
    total = tf.reduce_sum(tf.where(seen, losses, 0.0))
    return total / tf.cast(num_labels(labels), tf.float32) if reduction == "mean" else total


def num_correct(logits: Any, labels: Any, best: Mapping[str, int]) -> dict[str, Any]:
    """Return, for each metric, how many labels are among so many ``best`` classes."""
    most = min(max(best.values()), logits.shape[-1])
    classes = tf.math.top_k(tf.cast(logits, tf.float32), most, index_type=labels.dtype).indices
    correct = tf.cast(classes == labels[:, None], tf.int64)
    return {name: tf.reduce_sum(correct[:, :count]) for name, count in best.items()}


def set_training(module: tf.Module, *, training: bool) -> None:
    """Let batch normalization use the batch's statistics, or the running ones, and dropout drop values or not."""
    for layer in (module, *module.submodules):
        if isinstance(layer, (BatchNorm, Dropout)):
            layer.training = training
