"""Base class of engines that compute with PyTorch modules."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accelmark.infer.engine import DTYPES, Engine, EngineRequest


class TorchEngine(Engine):
    """An engine whose inputs and outputs are tensors on PyTorch's device; a subclass implements ``compute``."""

    reads = "model"
    precisions = ("fp32", "tf32", "bf16", "fp16")
    known_options = frozenset()

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        # fp32 means fp32: unless tf32 was requested, neither matmuls nor convolutions may use it.
        tf32 = request.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32

    @abstractmethod
    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute one batch that is on the device and in the precision; outputs stay there."""

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        return self.call(inputs), 0.0

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, compute it in inference mode, and copy its outputs back."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.call(inputs)
        return [output.cpu() for output in self.compute(self.to_device(inputs))]

    def to_device(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, floating tensors in the precision."""
        device, dtype = self.device, self.dtype
        return [each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in inputs]

    def model_on_device(self) -> nn.Module:
        """Return a copy of the model in eval mode, on the device and in the precision."""
        return copy.deepcopy(self.torch_model()).eval().to(self.device, self.dtype)

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return {"torch": torch.__version__, "dtype": str(self.dtype)}

    def device_memory_mib(self) -> float | None:
        """Return the peak of PyTorch's allocator on an accelerator, None on the CPU."""
        if self.device.type == "cpu":
            return None
        module = torch.get_device_module(self.device)
        return float(module.max_memory_allocated(self.device)) / 2**20


@contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress deprecation warnings from inside a compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
