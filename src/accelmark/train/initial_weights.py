"""Initial weights as NumPy arrays, for frameworks whose layers are given theirs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Initial = Callable[[tuple[int, ...], int], npt.NDArray[np.float32]]
"""Initial weights by shape and number of inputs of each output (``fan_in``)."""


def uniform(random: np.random.Generator) -> Initial:
    """Return PyTorch's initial weights of convolutions and linear layers: uniform up to 1 / sqrt(fan_in)."""
    return lambda shape, fan_in: random.uniform(-(fan_in**-0.5), fan_in**-0.5, shape).astype(np.float32)


def normal(random: np.random.Generator, std: float) -> Initial:
    """Return normal initial weights."""
    return lambda shape, fan_in: (std * random.standard_normal(shape)).astype(np.float32)
