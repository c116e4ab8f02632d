"""ONNX Runtime with any of its execution providers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from torch import Tensor, from_numpy

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest, text_options
from accelmark.infer.failures import CorruptModelError, EngineMissingError, PrecisionError
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
    """

    precisions = ("fp32", "fp16", "int8")
    known_options = frozenset({"providers", "spinning"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        try:
            import onnxruntime
        except ImportError as error:
            raise self.missing("onnxruntime", error) from error
        self.ort: Any = onnxruntime
        self.providers = self._providers()
        existing = self.engine_file()
        source = existing or self._in_precision(self.onnx_file())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = request.threads
        options.log_severity_level = 3
        # Spinning threads occupy cores: inference on a busy machine becomes ten times slower.
        spins = bool(request.options.get("spinning", False))
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
        if existing is None and self.providers[0] == _CPU:
            kept = request.work_dir / f"{self.name}.onnx"
            options.optimized_model_filepath = str(kept)
        else:
            kept = None
        self.cpu_nodes = "all" if self.providers[0] == _CPU else "none"
        self.session = self._session(source, options, existing is not None)
        if kept is not None and kept.is_file():
            self.keep(kept)
        active = self.session.get_providers()
        if self.providers[0] not in active:
            raise EngineMissingError(
                f"{self.name}: {self.providers[0]} could not start and the session fell back to "
                f"{', '.join(active)}; install what it needs (see the rank's log)"
            )
        self.inputs = [each.name for each in self.session.get_inputs()]

    def _providers(self) -> list[str]:
        available = self.ort.get_available_providers()
        named = list(text_options(self.request.options, "providers"))
        if not named:
            fitting = _PROVIDERS.get(self.request.device_type)
            if fitting is None:
                raise EngineMissingError(
                    f"{self.name}: no default execution provider for device {self.request.device_type!r}; "
                    "set engine_options.providers"
                )
            named = [next((name for name in fitting if name in available), fitting[0])]
        for name in named:
            if name not in available:
                raise EngineMissingError(
                    f"{self.name}: this build has no {name} ({nearest(name, available)}); install a build with it"
                )
        if self.request.precision == "fp32" and os.environ.get(_TF32_VARIABLE) != "0":
            for name in _TF32_BY_VARIABLE.intersection(named):
                raise PrecisionError(
                    f"{self.name}: {name} uses tf32 for fp32 and has no option to disable it; "
                    f"set {_TF32_VARIABLE}=0 in the environment, or use the engine tensorrt"
                )
        return named

    def _with_options(self) -> list[tuple[str, dict[str, str]]]:
        """Return the providers with the options that the precision needs."""
        fp32 = self.request.precision == "fp32"
        return [(name, _WITHOUT_TF32.get(name, {}) if fp32 else {}) for name in self.providers]

    def _session(self, path: Path, options: Any, loading: bool) -> Any:
        """Open a session, first without falling back to the CPU for single nodes, so that a fallback is detected."""
        if self.providers[0] != _CPU:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            try:
                return self.ort.InferenceSession(str(path), options, providers=self._with_options())
            except Exception as error:  # noqa: BLE001 - any error means that nodes need the CPU
                self.cpu_nodes = f"some ({' '.join(str(error).split())[:120]})"
                options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
        state = self.ort.capi.onnxruntime_pybind11_state
        try:
            return self.ort.InferenceSession(str(path), options, providers=self._with_options())
        except (state.InvalidProtobuf, state.NoSuchFile, state.NoModel) as error:
            if loading:
                raise self.incompatible(path, error) from error
            reason = " ".join(str(error).split())[:200]
            raise CorruptModelError(f"{path}: not a readable ONNX file; export it again ({reason})") from error
        except (state.Fail, state.InvalidGraph, state.NotImplemented, state.RuntimeException) as error:
            if loading:
                raise self.incompatible(path, error) from error
            raise

    def _in_precision(self, path: Path) -> Path:
        if self.request.precision == "fp32":
            return path
        target = self.request.work_dir / f"{self.name}-{self.request.precision}.onnx"
        try:
            from accelmark.infer import onnx_precision
        except ImportError as error:
            raise self.missing("onnx", error) from error
        if self.request.precision == "fp16":
            onnx_precision.write_fp16(path, target)
        elif self.request.precision == "int8":
            onnx_precision.write_int8(path, target, self.request.example)
        else:
            raise PrecisionError(f"{self.name} does not support {self.request.precision}")
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

    def close(self) -> None:
        """Close the session."""
        del self.session
