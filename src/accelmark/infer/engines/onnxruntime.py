"""ONNX Runtime with any of its execution providers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from torch import Tensor, from_numpy

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest, streams_of, text_options
from accelmark.infer.failures import InferenceError, shortened
from accelmark.spec.errors import nearest

_CPU: Final = "CPUExecutionProvider"
_PROVIDERS: Final = {
    "cpu": (_CPU,),
    # PyTorch also names AMD's devices cuda; a build of ONNX Runtime has one vendor's providers.
    "cuda": ("CUDAExecutionProvider", "MIGraphXExecutionProvider", "ROCMExecutionProvider"),
    "npu": ("CANNExecutionProvider",),
    "xpu": ("OpenVINOExecutionProvider",),
}
"""Default providers of a device type; the first that this build has is used."""
_WITHOUT_TF32: Final = {"CUDAExecutionProvider": {"use_tf32": "0"}}
"""Options that disable tf32, which a provider uses for fp32 by default."""
_TF32_BY_VARIABLE: Final = frozenset({"TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"})
"""Providers that use tf32 for fp32 unless the vendor's environment variable disables it."""
_TF32_VARIABLE: Final = "NVIDIA_TF32_OVERRIDE"


class Engine(Base):
    """A session on the providers in ``engine_options.providers``, or on the default one for the device.

    ``engine_options.spinning`` lets idle threads spin, which is slightly faster on an otherwise idle machine.
    ``engine_options.streams`` is the number of calls at the same time (1), which share the threads.
    """

    precisions = ("fp32", "fp16", "int8")
    known_options = frozenset({"providers", "spinning", "streams"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.ort = self.package("onnxruntime")
        self.providers = self._providers()
        existing = self.engine_file()
        source = existing or self._in_precision(self.onnx_file())
        options = self.ort.SessionOptions()
        self.concurrency = streams_of(request)
        options.intra_op_num_threads = max(1, request.threads // self.concurrency)
        options.log_severity_level = 3
        on_cpu = self.providers[0] == _CPU
        # Spinning threads occupy cores: inference on a busy machine becomes ten times slower.
        spins = bool(request.options.get("spinning", False))
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        kept = request.work_dir / f"{self.name}.onnx"
        if existing is None and on_cpu:
            options.optimized_model_filepath = str(kept)
        self.cpu_nodes = "all" if on_cpu else "none"
        self.session = self._session(source, options, existing is not None)
        if existing is None and on_cpu and kept.is_file():
            self.keep(kept)
        self.graph = kept if self.file is not None else source
        active = self.session.get_providers()
        if self.providers[0] not in active:
            what = f"{self.name}: {self.providers[0]} could not start and the session fell back to {', '.join(active)}"
            raise InferenceError(f"{what}; install what it needs (see the rank's log)", "engine_missing")
        self.inputs = [each.name for each in self.session.get_inputs()]

    def _providers(self) -> list[str]:
        available = self.ort.get_available_providers()
        named = list(text_options(self.request.options, "providers"))
        if not named:
            fitting = _PROVIDERS.get(self.request.device_type)
            if fitting is None:
                what = f"{self.name}: no default execution provider for device {self.request.device_type!r}"
                raise InferenceError(f"{what}; set engine_options.providers", "engine_missing")
            named = [next((name for name in fitting if name in available), fitting[0])]
        for name in named:
            if name not in available:
                what = f"{self.name}: this build has no {name} ({nearest(name, available)}); install a build with it"
                raise InferenceError(what, "engine_missing")
        if self.request.precision == "fp32" and os.environ.get(_TF32_VARIABLE) != "0":
            for name in _TF32_BY_VARIABLE.intersection(named):
                what = f"{self.name}: {name} uses tf32 for fp32 and has no option to disable it"
                remedy = f"set {_TF32_VARIABLE}=0 in the environment, or use the engine tensorrt"
                raise InferenceError(f"{what}; {remedy}", "bad_request")
        return named

    def _session(self, path: Path, options: Any, loading: bool) -> Any:
        """Open a session, first without falling back to the CPU for single nodes, so that a fallback is detected."""
        fp32 = self.request.precision == "fp32"
        providers = [(name, _WITHOUT_TF32.get(name, {}) if fp32 else {}) for name in self.providers]
        if self.providers[0] != _CPU:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            try:
                return self.ort.InferenceSession(str(path), options, providers=providers)
            except Exception as error:  # noqa: BLE001 - any error means that nodes need the CPU
                self.cpu_nodes = f"some ({shortened(error, 120)})"
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
        state = self.ort.capi.onnxruntime_pybind11_state
        unreadable = (state.InvalidProtobuf, state.NoSuchFile, state.NoModel)
        try:
            return self.ort.InferenceSession(str(path), options, providers=providers)
        except (*unreadable, state.Fail, state.InvalidGraph, state.NotImplemented, state.RuntimeException) as error:
            if loading:
                raise self.incompatible(path, error) from error
            if isinstance(error, unreadable):
                what = f"{path}: not a readable ONNX file; export it again ({shortened(error, 200)})"
                raise InferenceError(what, "corrupt_model") from error
            raise

    def _in_precision(self, path: Path) -> Path:
        if self.request.precision == "fp32":
            return path
        target = self.request.work_dir / f"{self.name}-{self.request.precision}.onnx"
        self.package("onnx")
        from accelmark.infer.onnx import precision

        if self.request.precision == "fp16":
            precision.write_fp16(path, target)
        else:
            precision.write_int8(path, target, self.request.example)
        return target

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        feeds = {name: each.numpy() for name, each in zip(self.inputs, inputs, strict=True)}
        return [from_numpy(each) for each in self.session.run(None, feeds)], 0.0

    def fingerprint(self) -> dict[str, str]:
        """Return the version, providers, device and precision that an optimised model is bound to."""
        return super().fingerprint() | {"onnxruntime": self.ort.__version__, "providers": ",".join(self.providers)}

    def describe(self) -> dict[str, str]:
        """Return the version, the active providers, and the number of nodes on the CPU."""
        active = ",".join(self.session.get_providers())
        return {"onnxruntime": self.ort.__version__, "providers": active, "nodes_on_cpu": self.cpu_nodes}

    def graph_types(self) -> dict[str, int] | None:
        """Return the types in the session's optimised graph; in its source, where the provider saves no graph."""
        self.package("onnx")
        from accelmark.infer.onnx.graph import matrix_types

        return matrix_types(self.graph)

    def close(self) -> None:
        """Close the session."""
        del self.session
