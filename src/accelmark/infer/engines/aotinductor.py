"""TorchInductor ahead of time: a shared library that needs no Python to run."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from torch import Tensor

from accelmark.infer.engine import DTYPES, EngineRequest, as_list
from accelmark.infer.engine import Engine as Base
from accelmark.infer.engines.eager import allocator_peak_mib, set_matmul_precision, to_device


class Engine(Base):
    """One package with a dynamic batch; ``exist_compiler_path`` takes its ``.pt2`` file."""

    reads = "model"
    precisions = ("fp32", "tf32", "bf16", "fp16")
    known_options = frozenset()
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        set_matmul_precision(tf32=request.precision == "tf32")
        existing = self.engine_file()
        path = existing or self._compile(request.work_dir / f"{self.name}.pt2")
        try:
            self.run = torch._inductor.aoti_load_package(str(path))  # the documented entry, whatever its name says
        except (RuntimeError, OSError, ValueError) as error:
            raise self.incompatible(path, error) from error

    def _compile(self, path: Path) -> Path:
        model = copy.deepcopy(self.torch_model()).eval().to(self.device, self.dtype)
        example = to_device(self.request.example, self.device, self.dtype)
        # An exporter takes a dimension of 1 for a constant.
        example = [torch.cat([each, each]) if each.shape[0] == 1 else each for each in example]
        batch = torch.export.Dim("batch", min=1)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, tuple(example), dynamic_shapes=tuple({0: batch} for _ in example))
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        self.keep(path)
        return path

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        if torch.is_inference_mode_enabled():
            return self._compute(inputs), 0.0
        with torch.inference_mode():
            return self._compute(inputs), 0.0

    def _compute(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = as_list(self.run(*to_device(inputs, self.device, self.dtype)))
        return [output.cpu() for output in outputs]

    def fingerprint(self) -> dict[str, str]:
        """Return the device, precision and PyTorch version that a package is bound to."""
        return super().fingerprint() | {"torch": torch.__version__}

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return {"torch": torch.__version__, "dtype": str(self.dtype)}

    def device_memory_mib(self) -> float | None:
        """Return the allocator's peak; None on the CPU."""
        return allocator_peak_mib(self.device)
