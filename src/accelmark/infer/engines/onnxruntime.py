"""ONNX Runtime with any of its execution providers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, from_numpy

from accelmark.frameworks.pytorch.training.platform import synchronize
from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest, InferenceError, shortened
from accelmark.infer.onnx_files import fp16_file, int8_file, matrix_types
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.settings.inference import number_option, switch_option, text_options

_CPU: Final = "CPUExecutionProvider"
_PROVIDERS: Final = {
    "cpu": (_CPU,),
    # PyTorch also names AMD's devices cuda; a build of ONNX Runtime has one vendor's providers.
    "cuda": ("CUDAExecutionProvider", "MIGraphXExecutionProvider", "ROCMExecutionProvider"),
    "npu": ("CANNExecutionProvider",),
    "xpu": ("OpenVINOExecutionProvider",),
}
"""Default providers of a device type; the first that this build has is used."""
_TF32_VARIABLE: Final = "NVIDIA_TF32_OVERRIDE"
_GRAPH_LEVELS: Final = {
    "disabled": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT", "all": "ORT_ENABLE_ALL",
}  # fmt: skip
_NUMPY: Final = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype.type
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""Types in which io-binding is told the elements of a tensor."""


class Engine(Base):
    """A session on the providers in ``engine_options.providers``, or on the default one for the device.

    ``engine_options.spinning`` lets idle threads spin, which is slightly faster on an otherwise idle machine.
    ``engine_options.streams`` is the number of calls at the same time (1), which share the threads.
    ``engine_options.io_binding`` gives the session the addresses of inputs and of outputs, of which it then makes no
    copy; inputs are copied to an accelerator by PyTorch. ``graph_level`` (disabled, basic, extended, layout, all) is
    the level of graph optimisation, ``execution_mode`` (sequential, parallel) whether independent operators of a call
    are computed at the same time, by ``inter_op_threads`` threads.
    """

    precisions = ("fp32", "fp16", "int8")
    known_options = frozenset(
        {"providers", "spinning", "streams", "io_binding", "graph_level", "execution_mode", "inter_op_threads"}
    )
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.ort = self.package("onnxruntime")
        self.providers = self._providers()
        self.built_with = {"onnxruntime": self.ort.__version__, "providers": ",".join(self.providers)}
        self.quantised: dict[str, str] = {}
        on_cpu = self.providers[0] == _CPU
        if (existing := self.engine_file()) is not None:
            source = existing
        elif request.precision == "int8":
            source, self.quantised = int8_file(self, on_cpu=on_cpu)
        else:
            source = fp16_file(self) if request.precision == "fp16" else self.onnx_file()
        options = self.ort.SessionOptions()
        self.concurrency = number_option(request.options, "streams", 1, least=1)
        options.intra_op_num_threads = max(1, request.threads // self.concurrency)
        options.log_severity_level = 3
        level = _GRAPH_LEVELS[str(request.options.get("graph_level", "all"))]
        options.graph_optimization_level = getattr(self.ort.GraphOptimizationLevel, level)
        mode = str(request.options.get("execution_mode", "sequential"))
        modes = self.ort.ExecutionMode
        options.execution_mode = {"sequential": modes.ORT_SEQUENTIAL, "parallel": modes.ORT_PARALLEL}[mode]
        if inter_op := number_option(request.options, "inter_op_threads", 0):
            if mode != "parallel":
                raise RequestError("engine_options.inter_op_threads has no effect without execution_mode: parallel")
            options.inter_op_num_threads = inter_op
        # Spinning threads occupy cores: inference on a busy machine becomes ten times slower.
        spins = "1" if switch_option(request.options, "spinning") else "0"
        for threads in ("intra_op", "inter_op"):
            options.add_session_config_entry(f"session.{threads}.allow_spinning", spins)
        file = request.work_dir / f"{self.name}.onnx"
        if existing is None and on_cpu:
            options.optimized_model_filepath = str(file)
        self.cpu_nodes = "all" if on_cpu else "none"
        self.session = self._session(source, options, existing is not None)
        if existing is None and on_cpu and file.is_file():
            self.keep(file)
        self.graph = file if self.file is not None else source
        active = self.session.get_providers()
        if self.providers[0] not in active:
            problem = f"{self.name}: {self.providers[0]} could not start, and the session uses {', '.join(active)}"
            raise InferenceError(f"{problem}; install its requirements (see the rank's log)", "engine_missing")
        self.inputs = self.named("inputs", [each.name for each in self.session.get_inputs()])
        self.outputs = self.named("outputs", [each.name for each in self.session.get_outputs()])
        self.binds = switch_option(request.options, "io_binding")
        self.rows: dict[tuple[torch.Size, ...], list[tuple[torch.Size, torch.dtype]]] = {}
        """Shapes of inputs -> shapes and types of outputs, as far as there was a call of them."""

    def _providers(self) -> list[str]:
        available = self.ort.get_available_providers()
        named = list(text_options(self.request.options, "providers"))
        if not named:
            fitting = _PROVIDERS.get(self.request.device_type)
            if fitting is None:
                problem = f"{self.name}: no default execution provider for device {self.request.device_type!r}"
                raise InferenceError(f"{problem}; set engine_options.providers", "engine_missing")
            named = [next((name for name in fitting if name in available), fitting[0])]
        for name in named:
            if name not in available:
                problem = f"{self.name}: this build has no {name} ({nearest(name, available)}); install a build with it"
                raise InferenceError(problem, "engine_missing")
        if self.request.precision == "fp32" and os.environ.get(_TF32_VARIABLE) != "0":
            for name in {"TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"}.intersection(named):
                problem = f"{self.name}: {name} uses tf32 for fp32 and has no option to disable it"
                remedy = f"set {_TF32_VARIABLE}=0 in the environment, or use the engine tensorrt"
                raise InferenceError(f"{problem}; {remedy}", "bad_request")
        return named

    def _session(self, path: Path, options: Any, loading: bool) -> Any:
        """Open a session, first without falling back to the CPU for single nodes, so that a fallback is detected."""
        # This provider uses tf32 for fp32 by default.
        without_tf32 = {"CUDAExecutionProvider": {"use_tf32": "0"}} if self.request.precision == "fp32" else {}
        providers = [(name, without_tf32.get(name, {})) for name in self.providers]
        if self.providers[0] != _CPU:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            try:
                return self.ort.InferenceSession(str(path), options, providers=providers)
            except Exception as error:  # noqa: BLE001 - any error means that nodes need the CPU
                self.cpu_nodes = f"some ({shortened(error, 120)})"
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
        try:
            return self.ort.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            if loading:
                raise self.incompatible(path, error) from error
            raise

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        if self.binds:
            return self._bound(inputs), 0.0
        feeds = {name: tensor.numpy() for name, tensor in zip_strict(self.inputs, inputs)}
        return [from_numpy(each) for each in self.session.run(self.outputs, feeds)], 0.0

    def _bound(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute one batch by addresses: fresh memory for outputs of known shapes, else ONNX Runtime's memory."""
        binding, device = self.session.io_binding(), self.request.device
        on_device = device.type != "cpu" and self.providers[0] != _CPU
        place = (device.type, device.index or 0) if on_device else ("cpu", 0)
        bound_inputs = [tensor.to(device).contiguous() if on_device else tensor.contiguous() for tensor in inputs]
        for name, each in zip_strict(self.inputs, bound_inputs):
            binding.bind_input(name, *place, _NUMPY[each.dtype], tuple(each.shape), each.data_ptr())
        key = tuple(each.shape for each in inputs)
        if (known := self.rows.get(key)) is None:
            for name in self.outputs:
                binding.bind_output(name, "cpu")
        else:
            outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in known]
            for name, each in zip_strict(self.outputs, outputs):
                binding.bind_output(name, "cpu", 0, _NUMPY[each.dtype], tuple(each.shape), each.data_ptr())
        if on_device:
            synchronize(device)  # PyTorch's copies are on another stream
        self.session.run_with_iobinding(binding)
        if known is None:
            outputs = [from_numpy(each) for each in binding.copy_outputs_to_cpu()]
            self.rows[key] = [(output.shape, output.dtype) for output in outputs]
        return outputs

    def describe(self) -> dict[str, str]:
        """Return the version, the active providers, the number of nodes on the CPU, and the bits of int8 weights."""
        active = ",".join(self.session.get_providers())
        return super().describe() | {"providers": active, "nodes_on_cpu": self.cpu_nodes} | self.quantised

    def graph_types(self) -> dict[str, int] | None:
        """Return the types in the session's optimised graph; in its source, where the provider saves no graph."""
        self.package("onnx")
        return matrix_types(self.graph)
