"""TorchInductor through ``torch.compile``."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor

from accelmark.infer.case import IterativeModel
from accelmark.infer.engine import EngineRequest, TorchEngine, as_list

GraphKey = tuple[tuple[torch.Size, bool], ...]
"""Key of a compiled graph: the shape of each input, and whether it was created in inference mode."""


class Engine(TorchEngine):
    """Compiles a graph at the first call with each batch size, whose time is reported as not inference.

    Of a model whose answers take dependent steps it compiles the parts that a step computes.

    ``engine_options.mode`` is the mode of ``torch.compile``. On accelerators ``reduce-overhead`` and ``max-autotune``
    record CUDA graphs; ``max-autotune-no-cudagraphs`` does not.
    """

    known_options = frozenset({"channels_last", "mode"})
    fixed_batch = True
    iterates = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.model = self.model_on_device()
        mode = str(request.options.get("mode", "default"))
        self.compiled: Any = self.model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the compiler
            if isinstance(self.model, IterativeModel):
                for part in self.model.parts():
                    part.compile(mode=mode, dynamic=False)
            else:
                self.compiled = torch.compile(self.model, mode=mode, dynamic=False)
        self.graphs: set[GraphKey] = set()
        with torch.inference_mode():
            self._compile([tensor.clone() for tensor in request.example])

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch, after compiling for its shape if it is new."""
        compiling_s = 0.0
        if _graph_key(inputs) not in self.graphs:
            began = time.perf_counter()
            self._compile(inputs)
            compiling_s = time.perf_counter() - began
        return self.call(inputs), compiling_s

    def _compile(self, inputs: list[Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the compiler
            self.call(inputs)
        self.graphs.add(_graph_key(inputs))

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        return as_list(self.compiled(*inputs))

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version, the element type and the number of compiled shapes."""
        return super().describe() | {"shapes": str(len(self.graphs))}


def _graph_key(inputs: list[Tensor]) -> GraphKey:
    return tuple((tensor.shape, tensor.is_inference()) for tensor in inputs)
