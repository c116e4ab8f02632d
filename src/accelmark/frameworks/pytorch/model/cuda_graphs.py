"""CUDA graphs: record a computation once for each shape of its inputs, and replay it with one launch.

Not tried on hardware; the tests replay recorded operators on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError

Compute = Callable[[list[Tensor]], list[Tensor]]
_Recording = tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]
"""A graph with its inputs and outputs."""
DEVICE_TYPES: Final = frozenset({"cuda"})
"""Device types of PyTorch that have CUDA graphs; AMD devices are of type cuda, too."""
_WARM_UPS: Final = 3
"""Calls before the recording, in which libraries choose algorithms and allocate their memory."""


@final
class GraphCalls:
    """A computation on an accelerator whose calls are replayed; the outputs of a call are overwritten by the next."""

    def __init__(self, compute: Compute, device: torch.device, engine: str) -> None:
        """Prepare to record ``compute``. Raises RequestError: the device has no CUDA graphs."""
        if device.type not in DEVICE_TYPES:
            problem = f"cuda_graphs needs a device of type cuda, and this one is of type {device.type}"
            raise RequestError(f"{engine}: engine_options.{problem}; remove the option")
        self.compute = compute
        self.recordings: dict[tuple[tuple[torch.Size, torch.dtype], ...], _Recording] = {}

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy ``inputs`` to the recorded addresses, and replay; record first if their shapes are new."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self.recordings:
            self.recordings[key] = self._record(inputs)
        graph, copies, outputs = self.recordings[key]
        for target, tensor in zip_strict(copies, inputs):
            target.copy_(tensor, non_blocking=True)
        graph.replay()
        return outputs

    def _record(self, inputs: list[Tensor]) -> _Recording:
        copies = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.compute(copies)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.compute(copies)
        return graph, copies, outputs
