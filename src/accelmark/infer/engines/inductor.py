"""TorchInductor through ``torch.compile``."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from accelmark.infer.engine import DTYPES, EngineRequest, as_list, text_options
from accelmark.infer.engine import Engine as Base
from accelmark.infer.engines.eager import allocator_peak_mib, set_matmul_precision, to_device

Kinds = tuple[tuple[torch.Size, bool], ...]
"""What a graph is compiled for: of each input the shape, and whether it was made in inference mode."""


class Engine(Base):
    """A graph compiled for each batch size as it first comes; that call's time is reported as not inference."""

    reads = "model"
    precisions = ("fp32", "tf32", "bf16", "fp16")
    known_options = frozenset({"mode"})
    fixed_batch = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        set_matmul_precision(tf32=request.precision == "tf32")
        self.model = copy.deepcopy(self.torch_model()).eval().to(self.device, self.dtype)
        mode = next(iter(text_options(request.options, "mode")), "default")
        with quiet():
            self.compiled = torch.compile(self.model, mode=mode, dynamic=False)
        self.seen: set[Kinds] = set()
        with torch.inference_mode():
            self._compile([each.clone() for each in request.example])

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch, compiling first where its shape is new."""
        kinds = _kinds(inputs)
        compiling_s = 0.0
        if kinds not in self.seen:
            began = time.perf_counter()
            self._compile(inputs)
            compiling_s = time.perf_counter() - began
        return self._compute(inputs), compiling_s

    def _compile(self, inputs: list[Tensor]) -> None:
        with quiet():
            self._compute(inputs)
        self.seen.add(_kinds(inputs))

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._compute(inputs)
        outputs = as_list(self.compiled(*to_device(inputs, self.device, self.dtype)))
        return [output.cpu() for output in outputs]

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return {"torch": torch.__version__, "dtype": str(self.dtype), "shapes": str(len(self.seen))}

    def device_memory_mib(self) -> float | None:
        """Return the allocator's peak; None on the CPU."""
        return allocator_peak_mib(self.device)

    def close(self) -> None:
        """Drop the compiled graphs."""
        del self.compiled, self.model
        torch.compiler.reset()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the compiler's own deprecation warnings away: nothing a reader can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _kinds(inputs: list[Tensor]) -> Kinds:
    return tuple((each.shape, each.is_inference()) for each in inputs)
