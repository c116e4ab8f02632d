"""NVIDIA TensorRT."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from accelmark.infer.engine import Compute, EngineRequest, GraphCalls, InferenceError, shortened
from accelmark.infer.engine import Engine as Base
from accelmark.spec.backports import zip_strict
from accelmark.spec.settings.inference import number_option, switch_option

_FLAGS: Final = {"tf32": "TF32", "fp16": "FP16", "bf16": "BF16"}
"""The builder's flag for each precision; TF32 is on unless cleared."""
_DTYPES: Final = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64,
    "INT8": torch.int8, "UINT8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Engine(Base):
    """A serialised plan with one optimisation profile: batches from 1 to ``batch_size``, optimised for ``batch_size``.

    ``engine_options.workspace_mib`` limits the builder's scratch memory, ``engine_options.optimization_level`` (0 to
    5) trades compile time for speed. ``engine_options.streams`` is the number of calls at the same time (1): execution
    contexts, each with a stream. With ``engine_options.cuda_graphs`` a context records a call of each shape and replays
    it. ``exist_compiler_path`` takes the ``.plan`` file.
    """

    precisions = ("fp32", "tf32", "fp16", "bf16")
    known_options = frozenset({"cuda_graphs", "optimization_level", "streams", "workspace_mib"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        trt = self.trt = self.package("tensorrt")
        self.built_with = {"tensorrt": trt.__version__}
        self.logger = trt.Logger(trt.Logger.WARNING)
        self.device = request.device
        path = self.engine_file() or self._compile(self.onnx_file(), request.work_dir / f"{self.name}.plan")
        self.runtime = trt.Runtime(self.logger)
        try:
            self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        except OSError as error:
            raise self.incompatible(path, error) from error
        if self.engine is None:
            raise self.incompatible(path, "TensorRT rejected it; see its log line above")
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = self.named("inputs", [name for name in names if is_input[name]])
        self.outputs = self.named("outputs", [name for name in names if not is_input[name]])
        self.dtypes = {name: _DTYPES[self.engine.get_tensor_dtype(name).name] for name in names}
        self.concurrency = number_option(request.options, "streams", 1, least=1)
        self.contexts: SimpleQueue[_Context] = SimpleQueue()
        for _ in range(self.concurrency):
            self.contexts.put(_Context(self))

    def _compile(self, source: Path, target: Path) -> Path:
        trt = self.trt
        builder = trt.Builder(self.logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(str(source)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            is_operator = any(error.code().name.startswith("UNSUPPORTED_NODE") for error in errors)
            reasons = shortened("; ".join(str(error.desc()) for error in errors), 300)
            problem = f"{source}: TensorRT cannot parse it; export it again, or replace unsupported operators"
            raise InferenceError(f"{problem} ({reasons})", "unsupported_operator" if is_operator else "corrupt_model")
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
                problem = f"{self.name} {trt.__version__} does not support {self.request.precision}; use fp32"
                raise InferenceError(problem, "bad_request")
            config.set_flag(flag)
        profile = builder.create_optimization_profile()
        inputs = [network.get_input(index).name for index in range(network.num_inputs)]
        for name, example in zip_strict(self.named("inputs", inputs), self.request.example):
            shape = tuple(example.shape)
            profile.set_shape(name, (1, *shape[1:]), shape, shape)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise InferenceError(f"{self.name}: the builder returned no plan for {source}; see its log line above")
        target.write_bytes(bytes(plan))
        self.keep(target)
        return target

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch in a context that no other call uses."""
        context = self.contexts.get()
        try:
            return context(inputs), 0.0
        finally:
            self.contexts.put(context)

    def describe(self) -> dict[str, str]:
        """Return TensorRT's version and the plan's activation memory."""
        size = self.engine.device_memory_size_v2 / 2**20
        return super().describe() | {"activation_memory_mib": f"{size:.1f}"}


class _Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.context = engine.engine.create_execution_context()
        if self.context is None:
            batch, streams = engine.request.example[0].shape[0], engine.concurrency
            problem = f"{engine.name}: no memory on the device for {streams} execution contexts at batch {batch}"
            raise InferenceError(problem, "out_of_memory")
        self.stream = torch.cuda.Stream(engine.device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.run: Compute = self._enqueue
        if switch_option(engine.request.options, "cuda_graphs"):
            self.run = GraphCalls(self._enqueue, engine.device, engine.name)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, compute it, and return its outputs on the CPU."""
        engine = self.engine
        with torch.cuda.stream(self.stream):
            on_device = [
                tensor.to(engine.device, engine.dtypes[name], non_blocking=True).contiguous()
                for name, tensor in zip_strict(engine.inputs, inputs)
            ]
            copies = [result.to("cpu", non_blocking=True) for result in self.run(on_device)]
        self.stream.synchronize()
        return copies

    def _enqueue(self, inputs: list[Tensor]) -> list[Tensor]:
        engine, context = self.engine, self.context
        for name, tensor in zip_strict(engine.inputs, inputs):
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise RuntimeError(f"input {name}: shape {tuple(tensor.shape)} is not compatible with the engine")
            context.set_tensor_address(name, tensor.data_ptr())
        results: list[Tensor] = []
        for name in engine.outputs:
            shape = tuple(context.get_tensor_shape(name))
            results.append(torch.empty(shape, dtype=engine.dtypes[name], device=engine.device))
            context.set_tensor_address(name, results[-1].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream(engine.device).cuda_stream):
            raise RuntimeError("TensorRT could not enqueue the batch; see its log line above")
        return results
