"""JAX states as NumPy arrays by name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def to_arrays(state: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a nested state by their path, on the host; random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(_data(leaf)) for path, leaf in leaves}


def from_arrays(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return ``state`` with the values of :func:`to_arrays`.

    Raises:
        KeyError: an array is missing.
        ValueError: an array has another shape.
    """

    def value(path: Any, leaf: Any) -> Any:
        array, expected = arrays[jax.tree_util.keystr(path)], _data(leaf)
        if array.shape != expected.shape:
            raise ValueError(f"{jax.tree_util.keystr(path)} has shape {array.shape}, not {expected.shape}")
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if expected is not leaf else array

    return jax.tree_util.tree_map_with_path(value, state)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
