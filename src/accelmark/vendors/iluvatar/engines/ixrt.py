"""Iluvatar IxRT, whose Python package has TensorRT 8's name and interface. Not tried on hardware.

Written after the builder scripts that Iluvatar publishes in DeepSparkInference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from accelmark.infer.engine import DTYPES, EngineRequest, InferenceError
from accelmark.infer.engine import Engine as Base
from accelmark.spec.backports import zip_strict

_DTYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "INT32": torch.int32, "INT8": torch.int8, "BOOL": torch.bool}


class Engine(Base):
    """A serialised engine for one batch size; ``exist_compiler_path`` takes the ``.engine`` file."""

    precisions = ("fp32", "fp16")
    fixed_batch = True
    known_options = frozenset()
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        rt = self.rt = self.package("tensorrt")
        self.built_with = {"ixrt": str(rt.__version__)}
        self.logger = rt.Logger(rt.Logger.WARNING)
        path = self.engine_file() or self._compile(self.onnx_file())
        self.runtime = rt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise self.incompatible(path, "IxRT rejected it; see its log line above")
        self.context = self.engine.create_execution_context()
        self.stream = torch.cuda.Stream(request.device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        indices = range(self.engine.num_bindings)
        self.buffers = [
            torch.empty(
                tuple(self.context.get_binding_shape(index)),
                dtype=_DTYPES[self.engine.get_binding_dtype(index).name],
                device=request.device,
            )
            for index in indices
        ]
        names = {self.engine.get_binding_name(index): index for index in indices}
        inputs = [name for name, index in names.items() if self.engine.binding_is_input(index)]
        self.inputs = [names[name] for name in self.named("inputs", inputs)]
        self.outputs = [names[name] for name in self.named("outputs", [name for name in names if name not in inputs])]

    def _compile(self, source: Path) -> Path:
        rt = self.rt
        builder = rt.Builder(self.logger)
        network = builder.create_network(1 << int(rt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
        parser = rt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(str(source)):
            raise InferenceError(f"{source}: IxRT cannot parse it; see its log line above", "unsupported_operator")
        config = builder.create_builder_config()
        if DTYPES[self.request.precision] is torch.float16:
            config.set_flag(rt.BuilderFlag.FP16)
        inputs = {each.name: each for each in map(network.get_input, range(network.num_inputs))}
        for name, example in zip_strict(self.named("inputs", list(inputs)), self.request.example):
            inputs[name].shape = rt.Dims(list(example.shape))
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise InferenceError(f"{self.name}: the builder returned no engine for {source}; see its log line above")
        target = self.request.work_dir / f"{self.name}.engine"
        target.write_bytes(bytes(plan))
        self.keep(target)
        return target

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        with torch.cuda.stream(self.stream):
            for index, each in zip_strict(self.inputs, inputs):
                self.buffers[index].copy_(each, non_blocking=True)
            addresses = [buffer.data_ptr() for buffer in self.buffers]
            if not self.context.execute_async_v2(addresses, self.stream.cuda_stream):
                raise RuntimeError("IxRT could not enqueue the batch; see its log line above")
            copies = [self.buffers[index].to("cpu", non_blocking=True) for index in self.outputs]
        self.stream.synchronize()
        return copies, 0.0
