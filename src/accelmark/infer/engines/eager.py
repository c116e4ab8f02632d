"""The framework itself, operator by operator: the baseline, and what validation runs in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from accelmark.infer.engine import DTYPES, EngineRequest, as_list
from accelmark.infer.engine import Engine as Base

Forward = Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]


def call(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Call ``model`` with its inputs in their order."""
    return as_list(model(*inputs))


class Engine(Base):
    """PyTorch's eager mode on the vendor's device."""

    reads = "model"
    precisions = ("fp32", "tf32", "bf16", "fp16")
    known_options = frozenset()

    def __init__(self, request: EngineRequest, forward: Forward = call) -> None:
        super().__init__(request)
        self.forward = forward
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        set_matmul_precision(tf32=request.precision == "tf32")
        self.model = copy.deepcopy(self.torch_model()).eval().to(self.device, self.dtype)

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        if torch.is_inference_mode_enabled():
            return self._compute(inputs), 0.0
        with torch.inference_mode():
            return self._compute(inputs), 0.0

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = self.forward(self.model, to_device(inputs, self.device, self.dtype))
        return [output.cpu() for output in outputs]

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return {"torch": torch.__version__, "dtype": str(self.dtype)}

    def device_memory_mib(self) -> float | None:
        """Return the allocator's peak; None on the CPU."""
        return allocator_peak_mib(self.device)

    def close(self) -> None:
        """Drop the model."""
        del self.model


def to_device(inputs: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Copy a batch to the device, floating tensors in ``dtype``."""
    return [each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in inputs]


def set_matmul_precision(*, tf32: bool) -> None:
    """Make fp32 mean fp32: where tf32 was not asked for, neither matmuls nor convolutions may use it."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def allocator_peak_mib(device: torch.device) -> float | None:
    """Return the peak of PyTorch's own allocator on an accelerator, None on the CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return float(module.max_memory_allocated(device)) / 2**20
