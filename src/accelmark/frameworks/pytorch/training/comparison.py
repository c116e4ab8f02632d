"""The model, batches and outputs of a job as NumPy arrays, to compare its first steps with another framework's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from accelmark.frameworks.pytorch.batches import mover
from accelmark.frameworks.pytorch.case import Batch, TrainCase
from accelmark.frameworks.pytorch.state import Training
from accelmark.spec.errors import RunError
from accelmark.spec.tensor_file import Array


@final
class Comparison:
    """See :class:`accelmark.train.loop.comparison.Comparison`: the names and layout of PyTorch are the reference's."""

    def __init__(self, case: TrainCase, training: Training, device: torch.device) -> None:
        self._case, self._training, self._model = case, training, training.original
        self._move = mover(device, channels_last=case.settings.channels_last)
        self.reference_names: Mapping[str, str] = {}
        for module in self._model.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0

    def parameters(self) -> dict[str, Array]:
        """Return the parameters, shared ones once; those that ranks share are gathered."""
        return {name: _array(parameter) for name, parameter in self._training.whole_parameters()}

    def statistics(self) -> dict[str, Array]:
        """Return the buffers of floating-point numbers that are saved with the model."""
        return {name: _array(buffer) for name, buffer in self._saved_buffers()}

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        saved = self._model.state_dict().keys()
        buffers = self._model.named_buffers()
        return ((name, buffer) for name, buffer in buffers if name in saved and buffer.is_floating_point())

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy arrays into parameters and buffers, or into this rank's shards of them."""
        for name, tensor in (*self._model.named_parameters(), *self._saved_buffers()):
            self._training.set_tensor(tensor, torch.from_numpy(np.array(weights[name])))

    def arrays(self, batch: object) -> dict[str, Array]:
        """Return a batch on the host."""
        return {name: tensor.cpu().contiguous().numpy() for name, tensor in cast("Batch", batch).items()}

    def batch(self, arrays: Mapping[str, Array]) -> Batch:
        """Return a batch on the device."""
        return self._move({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return the first tensor that the model returns where the case computes its loss."""
        tensors: list[Tensor] = []
        handle = self._model.register_forward_hook(lambda _module, _inputs, output: tensors.extend(_tensors(output)))
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            with torch.no_grad():
                self._training.forward(self._case, self.batch(arrays), self._case.loss)
                for buffer, before in buffers:
                    buffer.copy_(before)
        finally:
            handle.remove()
        if not tensors:
            raise RunError(f"{type(self._model).__name__} was not called by loss(), or returned no tensor")
        output = tensors[0] if self._case.sequence is None else self._case.sequence.joined(tensors[0])
        return self._training.broadcast_result(_array(output))


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a model: a tensor, or sequences and mappings of them."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (Mapping, tuple, list)):
        for value in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(value)


def _array(tensor: Tensor | nn.Parameter) -> Array:
    gather = getattr(tensor, "full_tensor", None)
    whole = tensor.detach() if gather is None else gather().detach()
    return whole.float().cpu().contiguous().numpy().copy()
