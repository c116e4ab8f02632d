"""NVIDIA TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest, number_option
from accelmark.infer.failures import InferenceError, shortened

_FLAGS: Final = {"tf32": "TF32", "fp16": "FP16", "bf16": "BF16"}
"""The builder's flag for each precision; TF32 is on unless cleared."""
_DTYPES: Final = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64,
    "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_OPERATOR_ERRORS: Final = ("UNSUPPORTED_NODE", "UNSUPPORTED_NODE_ATTR", "UNSUPPORTED_NODE_INPUT")


class Engine(Base):
    """A serialised plan with one optimisation profile: batches from 1 to ``batch_size``, optimised for ``batch_size``.

    ``engine_options.workspace_mib`` limits the builder's scratch memory, ``engine_options.optimization_level`` (0 to
    5) trades compile time for speed. ``exist_compiler_path`` takes the ``.plan`` file.
    """

    precisions = ("fp32", "tf32", "fp16", "bf16")
    known_options = frozenset({"optimization_level", "workspace_mib"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        trt = self.trt = self.package("tensorrt")
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.device = request.device
        existing = self.engine_file()
        path = existing or self._compile(self.onnx_file(), request.work_dir / f"{self.name}.plan")
        self.runtime = trt.Runtime(self.logger)
        try:
            self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        except OSError as error:
            raise self.incompatible(path, error) from error
        if self.engine is None:
            raise self.incompatible(path, "TensorRT rejected it; see its log line above")
        self.context = self.engine.create_execution_context()
        if self.context is None:
            batch = request.example[0].shape[0]
            what = f"{self.name}: no memory on the device for an execution context at batch {batch}"
            raise InferenceError(what, "out_of_memory")
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = [name for name in names if is_input[name]]
        self.outputs = [name for name in names if not is_input[name]]
        self.dtypes = {name: _DTYPES[self.engine.get_tensor_dtype(name).name] for name in names}

    def _compile(self, source: Path, target: Path) -> Path:
        trt = self.trt
        builder = trt.Builder(self.logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(str(source)):
            raise self._parser_error(source, [parser.get_error(index) for index in range(parser.num_errors)])
        config = builder.create_builder_config()
        config.builder_optimization_level = number_option(self.request.options, "optimization_level", 3)
        workspace_mib = number_option(self.request.options, "workspace_mib", 0)
        if workspace_mib:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mib * 2**20)
        if self.request.precision != "tf32":
            config.clear_flag(trt.BuilderFlag.TF32)
        if self.request.precision in _FLAGS:
            flag = getattr(trt.BuilderFlag, _FLAGS[self.request.precision], None)
            if flag is None:
                what = f"{self.name} {trt.__version__} does not support {self.request.precision}; use fp32"
                raise InferenceError(what, "bad_request")
            config.set_flag(flag)
        profile = builder.create_optimization_profile()
        for index, example in enumerate(self.request.example):
            shape = tuple(example.shape)
            profile.set_shape(network.get_input(index).name, (1, *shape[1:]), shape, shape)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise InferenceError(f"{self.name}: the builder returned no plan for {source}; see its log line above")
        target.write_bytes(bytes(plan))
        self.keep(target)
        return target

    def _parser_error(self, source: Path, errors: list[Any]) -> InferenceError:
        reasons = shortened("; ".join(str(error.desc()) for error in errors), 300)
        lacking = sorted({error.node_operator() for error in errors if error.code().name in _OPERATOR_ERRORS})
        if lacking:
            what = f"{self.name}: operators not supported: {', '.join(lacking)} ({reasons})"
            return InferenceError(what, "unsupported_operator")
        return InferenceError(f"{source}: not readable by TensorRT; export it again ({reasons})", "corrupt_model")

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        with torch.cuda.stream(self.stream):
            held = [
                each.to(self.device, self.dtypes[name], non_blocking=True).contiguous()
                for name, each in zip(self.inputs, inputs, strict=True)
            ]
            for name, each in zip(self.inputs, held, strict=True):
                if not self.context.set_input_shape(name, tuple(each.shape)):
                    raise RuntimeError(f"input {name}: shape {tuple(each.shape)} is not compatible with the engine")
                self.context.set_tensor_address(name, each.data_ptr())
            results: list[Tensor] = []
            for name in self.outputs:
                shape = tuple(self.context.get_tensor_shape(name))
                results.append(torch.empty(shape, dtype=self.dtypes[name], device=self.device))
                self.context.set_tensor_address(name, results[-1].data_ptr())
            if not self.context.execute_async_v3(self.stream.cuda_stream):
                raise RuntimeError("TensorRT could not enqueue the batch; see its log line above")
            copies = [result.to("cpu", non_blocking=True) for result in results]
        self.stream.synchronize()
        return copies, 0.0

    def fingerprint(self) -> dict[str, str]:
        """Return the device, precision and TensorRT version that a plan is bound to."""
        return super().fingerprint() | {"tensorrt": self.trt.__version__}

    def describe(self) -> dict[str, str]:
        """Return TensorRT's version and the plan's activation memory."""
        size = self.engine.device_memory_size_v2 / 2**20
        return {"tensorrt": self.trt.__version__, "activation_memory_mib": f"{size:.1f}"}

    def close(self) -> None:
        """Release the context and the engine."""
        del self.context, self.engine, self.runtime
