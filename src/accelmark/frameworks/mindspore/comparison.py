"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from accelmark.frameworks.mindspore.case import Batch, TrainCase
from accelmark.spec.errors import RunError
from accelmark.spec.tensor_file import Array
from accelmark.train.batches import Arrays
from accelmark.train.loop.comparison import ArrayComparison

_NAMES: Final = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var",
    "embedding_table": "weight",
}  # fmt: skip
"""MindSpore's name of an array of a layer -> PyTorch's."""


@final
class Comparison(ArrayComparison):
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(self, case: TrainCase, model: nn.Cell, to_device: Callable[[Arrays], Batch]) -> None:
        super().__init__(case, to_device)
        self._case, self._model = case, model
        for _, layer in model.cells_and_names():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def _parameters(self, *, trained: bool) -> Iterator[tuple[str, Parameter]]:
        for parameter in self._model.trainable_params() if trained else self._model.untrainable_params():
            prefix, dot, name = parameter.name.rpartition(".")
            yield f"{prefix}{dot}{_NAMES.get(name, name)}", parameter

    def weights(self, *, trained: bool) -> dict[str, Array]:
        """Return the trainable weights, or the running means and variances."""
        return {name: parameter.asnumpy().copy() for name, parameter in self._parameters(trained=trained)}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all parameters and statistics."""
        for trained in (True, False):
            for name, parameter in self._parameters(trained=trained):
                ops.assign(parameter, Tensor(np.ascontiguousarray(weights[name])))

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return what the model returns where the case computes its loss."""
        kept: list[Any] = []
        hook = self._model.register_forward_hook(lambda _layer, _inputs, output: kept.append(output))
        before = self.weights(trained=False)
        try:
            self._case.loss(self._model, self.batch(arrays))
        finally:
            hook.remove()
            for name, parameter in self._parameters(trained=False):
                ops.assign(parameter, Tensor(before[name]))
        if not kept:
            raise RunError(f"{type(self._model).__name__} was not called by loss()")
        found = kept[0][0] if isinstance(kept[0], list | tuple) else kept[0]
        outputs: Array = found.astype(ms.float32).asnumpy().copy()
        return outputs
