"""TorchInductor ahead of time: a shared library that runs without Python."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from accelmark.infer.engine import EngineRequest, TorchEngine, as_list


class Engine(TorchEngine):
    """One package with a dynamic batch; ``exist_compiler_path`` takes its ``.pt2`` file."""

    known_options = frozenset({"channels_last", "cuda_graphs"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.built_with = {"torch": torch.__version__}
        path = self.engine_file()
        if path is None:
            path = request.work_dir / f"{self.name}.pt2"
            # torch.export treats a dimension of 1 as constant.
            example = [torch.cat([tensor, tensor]) if tensor.shape[0] == 1 else tensor for tensor in request.example]
            # A named dimension would have to state the largest batch that the model's kernels allow (65,535 on CUDA).
            shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside the compiler
                inputs = tuple(self.to_device(example))
                program = torch.export.export(self.model_on_device(), inputs, dynamic_shapes=shapes)
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            self.keep(path)
        try:
            self.run = torch._inductor.aoti_load_package(str(path))  # the documented function
        except (RuntimeError, OSError, ValueError) as error:
            raise self.incompatible(path, error) from error

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        return as_list(self.run(*inputs))
