"""OpenVINO on Intel CPUs, GPUs and NPUs."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

from torch import Tensor, from_numpy

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest
from accelmark.infer.failures import InferenceError
from accelmark.spec.settings.engine_options import streams_option, text_options
from accelmark.spec.settings.inference import InferPrecision

_HINTS: Final[dict[InferPrecision, str]] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
_DEVICES: Final = {"cpu": "CPU", "xpu": "GPU"}
_MATRIX_LAYERS: Final = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul", "Gemm"})
_TYPES: Final = {"FP32": "float32", "f32": "float32", "BF16": "bfloat16", "bf16": "bfloat16", "FP16": "float16",
                 "f16": "float16", "I8": "int8", "i8": "int8", "U8": "int8", "u8": "int8"}  # fmt: skip
_PARSE_WORDS: Final = ("parse", "protobuf", "unable to read", "invalid")


class Engine(Base):
    """A compiled model on ``engine_options.ov_device``, or on the default device for the device type.

    For throughput OpenVINO chooses how many calls it computes at the same time, unless ``engine_options.streams`` does.
    In int8 it reads a quantised file, and what is not quantised is computed in fp32.
    """

    precisions = ("fp32", "bf16", "fp16", "int8")
    known_options = frozenset({"ov_device", "streams"})
    loads = True

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        # Importing openvino sends usage data from a process that it forks next to running threads, which can crash;
        # without this package it does not.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        self.ov = self.package("openvino")
        self.core = self.ov.Core()
        self.target = self._target()
        existing = self.engine_file()
        settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[request.precision],
            "PERFORMANCE_HINT": request.optimize_for.upper(),
            **({"NUM_STREAMS": streams_option(request.options)} if "streams" in request.options else {}),
            **({"INFERENCE_NUM_THREADS": request.threads} if self.target == "CPU" else {}),
        }
        self.compiled = self._load(existing, settings) if existing else self._compile(self.onnx_file(), settings)
        if request.optimize_for == "throughput" or "streams" in request.options:
            self.concurrency = int(self.compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        inputs = [port.get_any_name() for port in self.compiled.inputs]
        outputs = [port.get_any_name() for port in self.compiled.outputs]
        named = self.named("inputs", inputs)
        self.input_order = [named.index(name) for name in inputs]
        """For each input of the compiled model, the place in the case's."""
        self.output_order = [outputs.index(name) for name in self.named("outputs", outputs)]
        self.held = threading.local()
        """An inference request for each thread."""

    def _target(self) -> str:
        named = text_options(self.request.options, "ov_device")
        target = named[0] if named else _DEVICES.get(self.request.device_type, self.request.device_type.upper())
        available = self.core.available_devices
        if target.partition(".")[0] not in {each.partition(".")[0] for each in available}:
            found = ", ".join(available) or "none"
            raise InferenceError(f"{self.name}: device {target} does not exist; found {found}", "engine_missing")
        return target

    def _compile(self, path: Path, settings: dict[str, Any]) -> Any:
        try:
            model = self.core.read_model(self._in_precision(path))
        except RuntimeError as error:
            text = str(error)
            if "does not support the following" not in text and any(word in text.lower() for word in _PARSE_WORDS):
                what = f"{path}: not a readable ONNX file; export it again ({' '.join(text.split())[-200:]})"
                raise InferenceError(what, "corrupt_model") from error
            raise
        compiled = self.core.compile_model(model, self.target, settings)
        kept = self.request.work_dir / f"{self.name}.blob"
        kept.write_bytes(compiled.export_model().getvalue())
        self.keep(kept)
        return compiled

    def _in_precision(self, path: Path) -> Path:
        if self.request.precision != "int8":
            return path
        self.package("onnx")
        self.package("onnxruntime")
        from accelmark.infer.onnx.precision import write_int8

        target = self.request.work_dir / f"{self.name}-int8.onnx"
        write_int8(path, target, self.request.example)
        return target

    def _load(self, path: Path, settings: dict[str, Any]) -> Any:
        try:
            return self.core.import_model(path.read_bytes(), self.target, settings)
        except (RuntimeError, OSError) as error:
            raise self.incompatible(path, error) from error

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        if not hasattr(self.held, "infer_request"):
            self.held.infer_request = self.compiled.create_infer_request()
        given = [inputs[place].numpy() for place in self.input_order]
        results = self.held.infer_request.infer(given, share_inputs=True).to_tuple()
        return [from_numpy(results[place]) for place in self.output_order], 0.0

    def fingerprint(self) -> dict[str, str]:
        """Return the version, device and precision that a blob is bound to."""
        return super().fingerprint() | {"openvino": self.ov.__version__, "target": self.target}

    def describe(self) -> dict[str, str]:
        """Return the version, the device, and the precision that the plug-in reports."""
        computed = str(self.compiled.get_property("INFERENCE_PRECISION_HINT"))
        name = str(self.core.get_property(self.target, "FULL_DEVICE_NAME"))
        return {
            "openvino": self.ov.__version__,
            "ov_device": f"{self.target} {name}",
            "precision": computed,
            "streams": str(self.compiled.get_property("NUM_STREAMS")),
        }

    def graph_types(self) -> dict[str, int] | None:
        """Return the run-time precisions of the compiled model's convolutions and matrix products."""
        found: Counter[str] = Counter()
        for node in self.compiled.get_runtime_model().get_ops():
            facts = node.get_rt_info()
            if str(facts["layerType"].astype(str)) in _MATRIX_LAYERS:
                precision = str(facts["runtimePrecision"].astype(str))
                found[_TYPES.get(precision, precision)] += 1
        return dict(found) or None

    def close(self) -> None:
        """Release the compiled model."""
        del self.held, self.compiled
