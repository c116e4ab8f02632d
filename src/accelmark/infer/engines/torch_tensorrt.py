"""Torch-TensorRT: TensorRT inside a PyTorch program, without ONNX."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from accelmark.infer.engine import DTYPES, EngineRequest, as_list, number_option
from accelmark.infer.engine import Engine as Base
from accelmark.infer.engines.eager import allocator_peak_mib, set_matmul_precision, to_device


class Engine(Base):
    """The exported program compiled for batches from 1 to ``batch_size``.

    ``engine_options.min_block_size`` is the least number of operators that TensorRT takes together; operators that it
    lacks stay in PyTorch, on the same device.
    """

    reads = "model"
    precisions = ("fp32", "tf32", "fp16", "bf16")
    known_options = frozenset({"min_block_size"})

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        try:
            import torch_tensorrt
        except ImportError as error:
            raise self.missing("torch_tensorrt", error) from error
        self.package: Any = torch_tensorrt
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        set_matmul_precision(tf32=request.precision == "tf32")
        model = copy.deepcopy(self.torch_model()).eval().to(self.device, self.dtype)
        example = to_device(request.example, self.device, self.dtype)
        specifications = [
            torch_tensorrt.Input(
                min_shape=(1, *each.shape[1:]), opt_shape=tuple(each.shape), max_shape=tuple(each.shape),
                dtype=each.dtype,
            )
            for each in example
        ]  # fmt: skip
        self.compiled = torch_tensorrt.compile(
            model,
            ir="dynamo",
            inputs=specifications,
            use_explicit_typing=True,  # the model was cast above, so its types are the precision
            disable_tf32=request.precision != "tf32",
            min_block_size=number_option(request.options, "min_block_size", 5),
        )

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        if torch.is_inference_mode_enabled():
            return self._compute(inputs), 0.0
        with torch.inference_mode():
            return self._compute(inputs), 0.0

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = as_list(self.compiled(*to_device(inputs, self.device, self.dtype)))
        return [output.cpu() for output in outputs]

    def describe(self) -> dict[str, str]:
        """Return the versions and the element type."""
        return {
            "torch_tensorrt": self.package.__version__,
            "torch": torch.__version__,
            "dtype": str(self.dtype),
        }

    def device_memory_mib(self) -> float | None:
        """Return the peak of PyTorch's allocator; TensorRT's own memory is in telemetry only."""
        return allocator_peak_mib(self.device)

    def close(self) -> None:
        """Drop the compiled module."""
        del self.compiled
