"""OpenVINO on Intel CPUs, GPUs and NPUs."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, from_numpy

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest, InferenceError, TimedCall
from accelmark.infer.onnx_files import int8_file
from accelmark.spec.settings.inference import InferPrecision, number_option, text_options

_HINTS: Final[dict[InferPrecision, str]] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
_DEVICES: Final = {"cpu": "CPU", "xpu": "GPU"}
_MATRIX_LAYERS: Final = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul", "Gemm"})
_TYPES: Final = {"FP32": "float32", "f32": "float32", "BF16": "bfloat16", "bf16": "bfloat16", "FP16": "float16",
                 "f16": "float16", "I8": "int8", "i8": "int8", "U8": "int8", "u8": "int8"}  # fmt: skip


class Engine(Base):
    """A compiled model on ``engine_options.ov_device``, or on the default device for the device type.

    For throughput OpenVINO chooses how many calls it computes at the same time, unless ``engine_options.streams`` does.
    In int8 it reads a quantised file, and computes other operators in fp32. The model is compiled for the
    run's batch size, which is faster, and for any size when a call of another size is first made.
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
        self.quantised: dict[str, str] = {}
        existing = self.engine_file()
        self.settings: dict[str, object] = {
            "INFERENCE_PRECISION_HINT": _HINTS[request.precision],
            "PERFORMANCE_HINT": request.optimize_for.upper(),
            **({"INFERENCE_NUM_THREADS": request.threads} if self.target == "CPU" else {}),
        }
        if "streams" in request.options:
            self.settings["NUM_STREAMS"] = number_option(request.options, "streams", 1, least=1)
        self.source = None if existing else self.onnx_file()
        """The ONNX file that is compiled; None where a compiled model is loaded."""
        if self.source is not None and request.precision == "int8":
            self.source, self.quantised = int8_file(self, on_cpu=self.target == "CPU")
        if existing:
            try:
                self.compiled = self.core.import_model(existing.read_bytes(), self.target, self.settings)
            except (RuntimeError, OSError) as error:
                raise self.incompatible(existing, error) from error
        else:
            self.compiled = self._compile(request.example[0].shape[0])
            file = request.work_dir / f"{self.name}.blob"
            file.write_bytes(self.compiled.export_model().getvalue())
            self.keep(file)
        rows = self.compiled.inputs[0].get_partial_shape()[0]
        self.batch_size = None if rows.is_dynamic else rows.get_length()
        """Batch size that the model was compiled for; None: any."""
        self.any_size: Any = None
        """The model compiled for any batch size, once a call has had another size."""
        self.compiling = threading.Lock()
        if request.optimize_for == "throughput" or "streams" in request.options:
            self.concurrency = int(self.compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        inputs = [port.get_any_name() for port in self.compiled.inputs]
        outputs = [port.get_any_name() for port in self.compiled.outputs]
        named = self.named("inputs", inputs)
        self.input_order = [named.index(name) for name in inputs]
        """For each input of the compiled model, the place in the case's."""
        self.output_order = [outputs.index(name) for name in self.named("outputs", outputs)]
        self.requests: defaultdict[int, list[Any]] = defaultdict(list)
        """Inference requests that no call uses, for each compiled model."""
        self.bound: dict[int, tuple[Tensor, Any]] = {}
        """Views of inputs by the identity of their tensors, which are kept so that identities stay unique."""

    def _target(self) -> str:
        named = text_options(self.request.options, "ov_device")
        target = named[0] if named else _DEVICES.get(self.request.device_type, self.request.device_type.upper())
        available = self.core.available_devices
        if target.partition(".")[0] not in {name.partition(".")[0] for name in available}:
            devices = ", ".join(available) or "none"
            raise InferenceError(f"{self.name}: device {target} does not exist; found {devices}", "engine_missing")
        return target

    def _compile(self, batch_size: int | None) -> Any:
        model = self.core.read_model(self.source)
        if batch_size is not None:
            shapes = {port: list(port.get_partial_shape()) for port in model.inputs}
            model.reshape({port: [batch_size, *shape[1:]] for port, shape in shapes.items() if shape[0].is_dynamic})
        return self.core.compile_model(model, self.target, self.settings)

    def _prepared(self, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a compiled model for a call, and its inputs in order, filled up to a loaded model's batch."""
        ordered = [inputs[place] for place in self.input_order]
        size = ordered[0].shape[0]
        if self.batch_size in (None, size):
            return self.compiled, ordered
        if self.source is None:
            missing = max(0, (self.batch_size or 0) - size)
            return self.compiled, [torch.cat((each, each[-1:].expand(missing, *each.shape[1:]))) for each in ordered]
        with self.compiling:
            self.any_size = self.any_size or self._compile(None)
        return self.any_size, ordered

    def _bound(self, tensor: Tensor) -> Any:
        """Return OpenVINO's view of an input, kept since a window's inputs are in the same memory as the last one's."""
        entry = self.bound.get(id(tensor))
        if entry is None:
            if len(self.bound) >= 20_000:
                self.bound.clear()
            entry = self.bound[id(tensor)] = (tensor, self.ov.Tensor(tensor.numpy(), shared_memory=True))
        return entry[1]

    def _request(self, compiled: Any) -> Any:
        try:
            return self.requests[id(compiled)].pop()  # atomic: calls may come from several threads
        except IndexError:
            return compiled.create_infer_request()

    def _outputs(self, request: Any, size: int) -> list[Tensor]:
        return [from_numpy(request.get_output_tensor(place).data[:size].copy()) for place in self.output_order]

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        compiled, arguments = self._prepared(inputs)
        request, size = self._request(compiled), inputs[0].shape[0]
        for position, tensor in enumerate(arguments):  # infer with inputs takes 0.05 ms longer
            request.set_input_tensor(position, self.ov.Tensor(tensor.numpy(), shared_memory=True))
        request.infer(share_outputs=True)
        outputs = self._outputs(request, size)
        self.requests[id(compiled)].append(request)
        return outputs, 0.0

    def concurrently(self, calls: Sequence[list[Tensor]]) -> list[TimedCall]:
        """Compute calls in inference requests that are started and waited for in turn, all in this thread."""
        # Twice as many requests as streams: a stream has its next one while this thread handles the last one's answers.
        clock, number = time.perf_counter, min(2 * self.concurrency, len(calls))
        timed: list[TimedCall] = []
        running: deque[tuple[Any, Any, list[Tensor], float, int]] = deque()

        def finish() -> None:
            compiled, request, _, begin, size = running.popleft()  # the inputs live until the call has ended
            request.wait()
            end = clock()
            timed.append((self._outputs(request, size), begin, end))
            self.requests[id(compiled)].append(request)

        for inputs in calls:
            if len(running) == number:
                finish()
            begin = clock()
            compiled, arguments = self._prepared(inputs)
            request = self._request(compiled)
            for position, tensor in enumerate(arguments):  # start_async with inputs takes 0.1 ms longer
                request.set_input_tensor(position, self._bound(tensor))
            request.start_async()
            running.append((compiled, request, arguments, begin, inputs[0].shape[0]))
        while running:
            finish()
        return timed

    def fingerprint(self) -> dict[str, str]:
        """Return the version, device, precision and batch size that a blob is bound to."""
        size = str(self.request.example[0].shape[0])
        return super().fingerprint() | {"openvino": self.ov.__version__, "target": self.target, "batch_size": size}

    def describe(self) -> dict[str, str]:
        """Return the version, the device, the precision that the plug-in reports, and the bits of int8 weights."""
        return {
            "openvino": self.ov.__version__,
            "ov_device": f"{self.target} {self.core.get_property(self.target, 'FULL_DEVICE_NAME')}",
            "precision": str(self.compiled.get_property("INFERENCE_PRECISION_HINT")),
            "streams": str(self.compiled.get_property("NUM_STREAMS")),
            **self.quantised,
        }

    def graph_types(self) -> dict[str, int] | None:
        """Return the run-time precisions of the compiled model's convolutions and matrix products."""
        types: Counter[str] = Counter()
        for node in self.compiled.get_runtime_model().get_ops():
            facts = node.get_rt_info()
            if str(facts["layerType"].astype(str)) in _MATRIX_LAYERS:
                precision = str(facts["runtimePrecision"].astype(str))
                types[_TYPES.get(precision, precision)] += 1
        return dict(types) or None
