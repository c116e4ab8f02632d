"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from accelmark.frameworks.jax.case import TrainCase
from accelmark.frameworks.jax.devices import Devices
from accelmark.frameworks.jax.step import State, Step
from accelmark.spec.tensor_file import Array
from accelmark.train.loop.comparison import ArrayComparison

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
class Comparison(ArrayComparison):
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(
        self, case: TrainCase, step: Step, devices: Devices, read: Callable[[], State], write: Callable[[State], None]
    ) -> None:
        """``read`` and ``write`` return and set the state of the backend."""
        super().__init__(case, devices.batch)
        step.disable_dropout()
        self._step, self._devices, self._read, self._write = step, devices, read, write

    def _local(self) -> tuple[Any, Any]:
        state = self._read()
        return self._devices.local(state.parameters), self._devices.local(state.rest)

    def weights(self, *, trained: bool) -> dict[str, Array]:
        """Return the trainable weights, or the running means and variances."""
        found: dict[str, Array] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._local()[0 if trained else 1]):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                name, axes = _named(path, leaf)
                array = np.asarray(leaf, np.float32)
                found[name] = np.ascontiguousarray(array.transpose(axes)) if axes else array.copy()
        return found

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all arrays that have a name in ``weights``."""

        def value(path: Any, leaf: Any) -> Any:
            name, own_axes = _named(path, leaf)
            if name not in weights:
                return leaf
            array = weights[name]
            return jnp.asarray(np.transpose(array, np.argsort(own_axes)) if own_axes else array, leaf.dtype)

        parameters, rest = (jax.tree_util.tree_map_with_path(value, part) for part in self._local())
        self._write(self._read()._replace(**self._devices.replicated({"parameters": parameters, "rest": rest})))

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return what the model returns where the case computes its loss."""
        return np.asarray(self._step.outputs(*self._local(), dict(arrays)), np.float32)


def _named(path: Any, leaf: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name of an array with PyTorch's name of its last part, and its axes in PyTorch's order."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    axes = _KERNEL_AXES.get(leaf.ndim) if parts[-1] == "kernel" else None
    return ".".join([*parts[:-1], _LEAVES.get(parts[-1], parts[-1])]), axes
