"""A loop that a person would write for one runtime; the last line printed has its figures as JSON.

``python benchmarks/expert_loop.py KIND MODEL.onnx BATCH SECONDS [PRECISION]``, started by ``inference_peers.py``. It
imports nothing of AccelMark. Kinds: ``ort`` (``session.run`` with default options), ``ort-binding`` (io-binding to
buffers that are made once), ``ov-sync`` (one inference request after the other, for latency), ``ov-queue``
(``AsyncInferQueue``, for throughput, with a callback that copies the outputs).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_INPUTS = 8
"""Different batches, given in turn."""
LENGTH = 64
"""Extent of a dimension that is dynamic besides the batch."""
Batch = dict[str, Any]


def inputs_of(model: Path, batch: int) -> list[Batch]:
    """Return made-up batches for the inputs of an ONNX file."""
    import onnx

    chance = np.random.default_rng(1)
    graph = onnx.load(model, load_external_data=False).graph

    def values(declared: Any, place: int) -> Any:
        found = declared.type.tensor_type
        shape = [batch, *(dim.dim_value or LENGTH for dim in found.shape.dim[1:])]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(found.elem_type)
        if dtype.kind == "f":
            return chance.standard_normal(shape).astype(dtype)
        return chance.integers(1000, 9000, shape) if place == 0 else np.full(shape, int(place == 1), dtype)

    return [
        {declared.name: values(declared, place) for place, declared in enumerate(graph.input)}
        for _ in range(NUM_INPUTS)
    ]


def timed(call: Callable[[Batch], object], batches: list[Batch], seconds: float, finish: Callable[[], object]) -> float:
    """Return the seconds of a call, after a warm-up of a quarter of the time."""
    took = 0.0
    for limit in (seconds / 4, seconds):
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < limit or count < 3:
            call(batches[count % NUM_INPUTS])
            count += 1
        finish()
        took = (time.perf_counter() - began) / count
    return took


def main(kind: str, model: str, batch: int, seconds: float, precision: str = "fp32") -> None:
    batches = inputs_of(Path(model), batch)
    if kind.startswith("ort"):
        import onnxruntime as ort

        library, session = ort, ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        if kind == "ort":
            took = timed(lambda feeds: session.run(None, feeds), batches, seconds, lambda: None)
        else:
            binding, held = session.io_binding(), session.run(None, batches[0])
            for output, value in zip(session.get_outputs(), held, strict=True):
                binding.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_numpy(value))

            def bound(feeds: Batch) -> None:
                for name, value in feeds.items():
                    binding.bind_cpu_input(name, value)
                session.run_with_iobinding(binding)
                binding.copy_outputs_to_cpu()

            took = timed(bound, batches, seconds, lambda: None)
    else:
        import openvino as ov

        library = ov
        hint = {"PERFORMANCE_HINT": "THROUGHPUT" if kind == "ov-queue" else "LATENCY"}
        if precision != "default":
            hint["INFERENCE_PRECISION_HINT"] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}[precision]
        compiled = ov.Core().compile_model(model, "CPU", hint)
        if kind == "ov-sync":
            request = compiled.create_infer_request()
            took = timed(lambda feeds: request.infer(feeds, share_inputs=True), batches, seconds, lambda: None)
        else:
            queue = ov.AsyncInferQueue(compiled)
            queue.set_callback(lambda request, _: [each.data.copy() for each in request.output_tensors])
            took = timed(lambda feeds: queue.start_async(feeds, share_inputs=True), batches, seconds, queue.wait_all)
    print(json.dumps({"items_per_s": batch / took, "version": library.__version__}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
