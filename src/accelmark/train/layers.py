"""``nn``: the layers from which ``arrays.py`` of a case builds a model in several frameworks.

A process trains in one framework. Its backend selects the framework's layers before it imports the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

nn: Any
"""``layers.py`` of the framework's folder: layers with the names and the meaning of PyTorch's.

A model is an ``nn.Module`` with ``forward``; blocks whose activations can be recomputed set ``is_block``. Images are in
the framework's own layout behind ``nn.Normalize``. Layers take their initial weights from ``nn.normal(std)``,
``nn.uniform`` or ``nn.normal_fan_out``.
"""
Weights = npt.NDArray[np.float32]
Initial = Callable[[np.random.Generator, tuple[int, ...], int, int], Weights]
"""Returns initial weights of a shape, by the number of inputs of each output and of outputs of each input."""


def use_layers(layers: ModuleType) -> None:
    """Select the layers of a framework."""
    global nn
    nn = layers


def uniform(random: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Weights:
    """Return PyTorch's initial weights of convolutions and linear layers: uniform up to 1 / sqrt(fan_in)."""
    return random.uniform(-(fan_in**-0.5), fan_in**-0.5, shape).astype(np.float32)


def normal(std: float) -> Initial:
    """Return normal initial weights."""
    return lambda random, shape, fan_in, fan_out: (std * random.standard_normal(shape)).astype(np.float32)


def normal_fan_out(random: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> Weights:
    """Return normal initial weights of convolutions before ReLU (He et al. 2015, arXiv:1502.01852)."""
    return normal(math.sqrt(2 / fan_out))(random, shape, fan_in, fan_out)


def rotary_angles(width: int, length: int) -> tuple[Weights, Weights]:
    """Return cosine and sine of rotary embeddings (Su et al. 2021, arXiv:2104.09864), of shape (length, 1, width).

    The sine of the first half is negative: ``x * cos + roll(x, width // 2) * sin`` rotates ``x``.
    """
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(length), rates)[:, None].astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((cos, cos), -1), np.concatenate((-sin, sin), -1)
