"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np

from accelmark.frameworks.tensorflow.case import TrainCase
from accelmark.frameworks.tensorflow.step import Step
from accelmark.spec.tensor_file import Array
from accelmark.train.batches import Arrays
from accelmark.train.loop.comparison import ArrayComparison

_KERNEL_AXES: Final = {2: (1, 0), 4: (3, 2, 0, 1)}
"""Dimensions of a kernel -> its axes in PyTorch's order, which is (out, in, ...) instead of (..., in, out)."""


@final
class Comparison(ArrayComparison):
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(self, case: TrainCase, step: Step, to_device: Callable[[Arrays], Any]) -> None:
        super().__init__(case, to_device)
        self._step = step

    def weights(self, *, trained: bool) -> dict[str, Array]:
        """Return the trainable weights, or the running means and variances."""
        found: dict[str, Array] = {}
        for name, variable in self._step.variables.items():
            if (name in self._step.parameters) == trained:
                own, axes = _named(name, variable)
                array = variable.numpy()
                found[own] = np.ascontiguousarray(array.transpose(axes)) if axes else array
        return found

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all parameters and statistics."""
        for name, variable in self._step.variables.items():
            own, axes = _named(name, variable)
            variable.assign(np.transpose(weights[own], np.argsort(axes)) if axes else weights[own])

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return what the model returns where the case computes its loss."""
        before = self.statistics()
        found = np.asarray(self._step.outputs(self._to_device(dict(arrays)))).astype(np.float32)
        for name, variable in self._step.variables.items():
            if name in before:
                variable.assign(before[name])
        return found


def _named(name: str, variable: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return PyTorch's name of a variable, and its axes in PyTorch's order."""
    layer, _, own = name.rpartition(".")
    if own != "kernel":
        return name, None
    return f"{layer}.weight", _KERNEL_AXES[variable.shape.rank]
