"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, final

import numpy as np
import paddle
from paddle import Tensor, nn

from accelmark.frameworks.paddle.case import Batch, TrainCase
from accelmark.spec.errors import RunError
from accelmark.spec.tensor_file import Array
from accelmark.train.batches import Arrays
from accelmark.train.loop.comparison import ArrayComparison

_STATISTICS: Final = {"_mean": "running_mean", "_variance": "running_var"}
"""Paddle's name of an array of a layer -> PyTorch's."""


@final
class Comparison(ArrayComparison):
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(
        self,
        case: TrainCase,
        model: nn.Layer,
        autocast: Callable[[], AbstractContextManager[Any]],
        to_device: Callable[[Arrays], Batch],
    ) -> None:
        super().__init__(case, to_device)
        self._case, self._model, self._autocast = case, model, autocast
        for layer in model.sublayers(include_self=True):
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def _tensors(self, *, trained: bool) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, tensor and whether PyTorch's layer has it transposed; shared tensors once."""
        seen: set[int] = set()
        for prefix, layer in self._model.named_sublayers(include_self=True):
            for name, tensor in layer.state_dict(include_sublayers=False).items():
                is_trained = not tensor.stop_gradient
                if is_trained == trained and tensor.is_floating_point() and id(tensor) not in seen:
                    seen.add(id(tensor))
                    own = _STATISTICS.get(name, name)
                    yield (
                        f"{prefix}.{own}" if prefix else own,
                        tensor,
                        isinstance(layer, nn.Linear) and name == "weight",
                    )

    def weights(self, *, trained: bool) -> dict[str, Array]:
        """Return the trainable weights, or the running means and variances."""
        found = self._tensors(trained=trained)
        return {name: _array(tensor.T if transposed else tensor) for name, tensor, transposed in found}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all parameters and statistics."""
        for trained in (True, False):
            for name, tensor, transposed in self._tensors(trained=trained):
                tensor.set_value(np.ascontiguousarray(weights[name].T if transposed else weights[name]))

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return what the model returns where the case computes its loss."""
        kept: list[Any] = []
        hook = self._model.register_forward_post_hook(lambda _layer, _inputs, output: kept.append(output))
        before = [(tensor, tensor.clone()) for _, tensor, _ in self._tensors(trained=False)]
        try:
            with self._autocast():
                self._case.loss(self._model, self.batch(arrays))
        finally:
            hook.remove()
            for tensor, value in before:
                tensor.set_value(value)
        if not kept:
            raise RunError(f"{type(self._model).__name__} was not called by loss()")
        return _array(kept[0][0] if isinstance(kept[0], list | tuple) else kept[0])


def _array(tensor: Tensor) -> Array:
    return np.array(tensor.astype("float32").numpy())
