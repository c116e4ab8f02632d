"""Layers with float32 weights that compute in a given type; images have the channels last."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from accelmark.train.initial_weights import Initial, normal


def normal_fan_out(random: np.random.Generator) -> Initial:
    """Return normal initial weights of convolutions before ReLU, by the number of outputs of each input.

    He et al. 2015, arXiv:1502.01852.
    """
    return lambda shape, fan_in: normal(random, math.sqrt(2 / (math.prod(shape[:-2]) * shape[-1])))(shape, fan_in)


class Linear(tf.Module):
    """A product with a matrix, with a bias if ``bias`` is given."""

    def __init__(self, size_in: int, size_out: int, initial: Initial, dtype: Any, *, bias: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.kernel = tf.Variable(initial((size_in, size_out), size_in))
        if bias:
            self.bias = tf.Variable(initial((size_out,), size_in))
        self.is_biased = bias

    def __call__(self, x: Any) -> Any:
        """Return ``x`` of shape (..., in) times the matrix."""
        flat = tf.reshape(tf.cast(x, self.dtype), (-1, self.kernel.shape[0]))
        out = tf.reshape(tf.matmul(flat, tf.cast(self.kernel, self.dtype)), (*x.shape[:-1], self.kernel.shape[1]))
        return out + tf.cast(self.bias, self.dtype) if self.is_biased else out


class Conv2D(tf.Module):
    """A convolution of (batch, height, width, channels) without bias."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        size: int,
        initial: Initial,
        dtype: Any,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.dtype, self.stride = dtype, stride
        self.padding = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        self.kernel = tf.Variable(initial((size, size, channels_in, channels_out), size * size * channels_in))

    def __call__(self, x: Any) -> Any:
        """Return the convolved images."""
        return tf.nn.conv2d(tf.cast(x, self.dtype), tf.cast(self.kernel, self.dtype), self.stride, self.padding)


class BatchNorm(tf.Module):
    """Batch normalization over the last dimension, with the statistics of this rank's batch while training."""

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.training, self.momentum, self.eps = True, momentum, eps
        self.weight, self.bias = tf.Variable(tf.ones(channels)), tf.Variable(tf.zeros(channels))
        self.running_mean = tf.Variable(tf.zeros(channels), trainable=False)
        self.running_var = tf.Variable(tf.ones(channels), trainable=False)

    def __call__(self, x: Any) -> Any:
        """Return the normalized input; training moves the running statistics."""
        found = tf.raw_ops.FusedBatchNormV3(
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
            self.running_mean.assign(found.batch_mean)
            self.running_var.assign(found.batch_variance)
        return found.y


class Embedding(tf.Module):
    """Rows of a table."""

    def __init__(self, rows: int, width: int, initial: Initial, dtype: Any) -> None:
        super().__init__()
        self.dtype, self.weight = dtype, tf.Variable(initial((rows, width), width))

    def __call__(self, tokens: Any) -> Any:
        """Return the rows of ``tokens``, of shape (..., width)."""
        return tf.cast(tf.gather(self.weight, tokens), self.dtype)


class RmsNorm(tf.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, tf.Variable(tf.ones(size))

    def __call__(self, x: Any) -> Any:
        """Return the scaled input in the type of ``x``; the mean is computed in float32."""
        wide = tf.cast(x, tf.float32)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), -1, keepdims=True) + self.eps)
        return tf.cast(wide * scale * self.weight, x.dtype)


def causal_attention(query: Any, key: Any, value: Any) -> Any:
    """Return scaled dot-product attention to earlier positions, for tensors of shape (batch, length, heads, width).

    Scores are scaled and normalized in float32.
    """
    length, width = query.shape[1], query.shape[-1]
    scores = tf.cast(tf.einsum("btnh,bsnh->bnts", query, key), tf.float32) * width**-0.5
    mask = np.tri(length, dtype=bool)
    weights = tf.nn.softmax(tf.where(mask, scores, -np.inf))
    return tf.einsum("bnts,bsnh->btnh", tf.cast(weights, value.dtype), value)


def named_variables(module: tf.Module) -> dict[str, Any]:
    """Return all variables of a model by their path, for example ``blocks.0.conv1.kernel``."""
    found = module._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
    return {".".join(map(str, path)): variable for path, variable in found}


def set_training(module: tf.Module, *, training: bool) -> None:
    """Let batch normalization use the batch's statistics, or the running ones."""
    for layer in (module, *module.submodules):
        if isinstance(layer, BatchNorm):
            layer.training = training
