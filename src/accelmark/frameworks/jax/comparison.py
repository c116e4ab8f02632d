"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from accelmark.frameworks.jax.case import TrainCase
from accelmark.spec.tensor_file import Array

_LEAVES: Final = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
"""Flax's name of an array of a layer -> PyTorch's."""
_KERNEL_AXES: Final = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1)}
"""Dimensions of a kernel -> its axes in PyTorch's order, which is (out, in, ...) instead of (..., in, out)."""


@final
class Comparison:
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(
        self,
        case: TrainCase,
        model: nnx.GraphDef[Any],
        read: Callable[[], tuple[Any, Any]],
        write: Callable[[Any, Any], None],
        share: Callable[[Array], jax.Array],
    ) -> None:
        """``read`` returns the parameters and the rest of the model's state; ``write`` sets them on all devices."""
        self._case, self._model, self._read, self._write, self._share = case, model, read, write, share
        self.reference_names = case.reference_names
        self.reference_axes = case.reference_axes
        self._outputs = jax.jit(self._traced_outputs)

    def parameters(self) -> dict[str, Array]:
        """Return the trainable weights."""
        return _arrays(self._read()[0])

    def statistics(self) -> dict[str, Array]:
        """Return the running means and variances."""
        return _arrays(self._read()[1])

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all arrays that have a name in ``weights``."""

        def value(path: Any, leaf: Any) -> Any:
            name, own_axes = _named(path, leaf)
            if name not in weights:
                return leaf
            array = weights[name]
            return jnp.asarray(np.transpose(array, np.argsort(own_axes)) if own_axes else array, leaf.dtype)

        parameters, rest = (jax.tree_util.tree_map_with_path(value, part) for part in self._read())
        self._write(parameters, rest)

    def arrays(self, batch: object) -> dict[str, Array]:
        """Return a batch on the host."""
        return {name: np.asarray(array) for name, array in dict(batch).items()}  # type: ignore[call-overload]

    def _typed(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        types = {name: array.dtype for name, array in self._case.synthetic_batch(1).items()}
        return {name: np.asarray(array, types[name]) for name, array in arrays.items()}

    def batch(self, arrays: Mapping[str, Array]) -> Any:
        """Return a batch on the devices, of the types of the case's own data."""
        return {name: self._share(array) for name, array in self._typed(arrays).items()}

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return what the model returns where the case computes its loss."""
        found = self._outputs(*self._read(), self._typed(arrays))
        return np.asarray(found, np.float32)

    def _traced_outputs(self, parameters: Any, rest: Any, batch: Any) -> jax.Array:
        model = nnx.merge(self._model, parameters, rest, copy=True)
        model.train()
        kept: list[Any] = []

        def recorded(*inputs: Any) -> Any:
            kept.append(model(*inputs))
            return kept[-1]

        self._case.loss(recorded, batch)
        return jax.tree.leaves(kept[0])[0]


def _arrays(state: Any) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            name, axes = _named(path, leaf)
            array = np.asarray(leaf, np.float32)
            found[name] = np.ascontiguousarray(array.transpose(axes)) if axes else array.copy()
    return found


def _named(path: Any, leaf: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name of an array with PyTorch's name of its last part, and its axes in PyTorch's order."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    parts = parts[:-1] if parts[-1] == "value" else parts
    axes = _KERNEL_AXES.get(leaf.ndim) if parts[-1] == "kernel" else None
    return ".".join([*parts[:-1], _LEAVES.get(parts[-1], parts[-1])]), axes
