"""ONNX files: export, conversion to a precision, and the types that a graph computes in."""

from __future__ import annotations

import logging
import platform
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from accelmark.infer.engine import CALIBRATION_ITEMS, Engine, InferenceError
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.plugins.requirements import pip_install
from accelmark.telemetry.host import cpu_features

_TYPES: Final = {
    "FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "DOUBLE": "float64", "INT8": "int8",
    "UINT8": "int8", "INT4": "int4", "UINT4": "int4", "FLOAT8E4M3FN": "float8_e4m3fn",
}  # fmt: skip
_PASSED: Final = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Identity", "Reshape"})
"""Operators between stored weights and the operator that uses them. A ``Cast`` is not one: it changes the type."""


def export_onnx(
    model: nn.Module, example: Sequence[Tensor], path: Path, input_names: Sequence[str], output_names: Sequence[str]
) -> None:
    """Export ``model`` to ``path`` with the batch as a dynamic first dimension of every input."""
    problem = f"the ONNX export needs onnx and onnxscript: run {pip_install(['onnx', 'onnxscript'])}"
    with raising(partial(InferenceError, end_reason="engine_missing"), problem, ImportError):
        import onnx  # noqa: F401 - only the export needs it
        import onnxscript  # noqa: F401
    if len(example) != len(input_names):
        raise RequestError(f"the case names {len(input_names)} inputs, its data has {len(example)}")
    # The exporter treats a dimension of 1 as constant, so the example needs at least two items.
    inputs = tuple(torch.cat([tensor, tensor])[:2] if tensor.shape[0] < 2 else tensor[:2] for tensor in example)
    weights = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    batch = torch.export.Dim("batch", min=1)
    logging.getLogger("torch.onnx").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        torch.onnx.export(
            model,
            inputs,
            path,
            input_names=list(input_names),
            output_names=list(output_names),
            dynamo=True,
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            external_data=weights > 1_900_000_000,  # protobuf's limit is 2 GiB
            verbose=False,
        )


def matrix_types(path: Path) -> dict[str, int] | None:
    """Return {type of the stored weights: number of matrix products and convolutions}; None where there are none."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    stored = {each.name: each.data_type for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            stored[node.output[0]] = node.attribute[0].t.data_type
        elif node.op_type in _PASSED and node.input and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
    types: Counter[str] = Counter()
    for node in graph.node:
        if any(word in node.op_type for word in ("Conv", "MatMul", "Gemm", "Attention")):
            names = [onnx.TensorProto.DataType.Name(stored[name]) for name in node.input if name in stored]
            weights = [_TYPES.get(name, name.lower()) for name in names]
            # In quantised operators the first two stored inputs may be scales, which are single numbers.
            quantised = [weight for weight in weights if weight in ("int8", "int4")]
            if weights:
                types[(quantised or weights)[0]] += 1
    return dict(types) or None


def fp16_file(engine: Engine) -> Path:
    """Write the engine's ONNX file with fp16 weights and arithmetic; inputs and outputs stay fp32."""
    onnx = engine.package("onnx")
    from onnxruntime.transformers.float16 import convert_float_to_float16

    target = engine.request.work_dir / f"{engine.name}-fp16.onnx"
    onnx.save(convert_float_to_float16(onnx.load(engine.onnx_file()), keep_io_types=True), target)
    return target


def int8_file(engine: Engine, *, on_cpu: bool) -> tuple[Path, dict[str, str]]:
    """Write the engine's ONNX file quantised to int8 (static, per channel), calibrated on the items of its request.

    Weights have 8 bits; 7 for an x86 CPU without VNNI, which sums products of 8-bit numbers with saturation (remedy of
    OpenVINO's and ONNX Runtime's documentation). Returns the file, and the bits as an engine describes them.
    """
    onnx = engine.package("onnx")
    engine.package("onnxruntime")
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc] # untyped package
        """Returns one item at a time."""

        def __init__(self, names: Sequence[str]) -> None:
            columns = [torch.split(tensor[:CALIBRATION_ITEMS], 1) for tensor in engine.request.calibration]
            self.names, self.items = names, zip_strict(*columns)

        def get_next(self) -> dict[str, Any] | None:
            item = next(self.items, None)
            return None if item is None else {name: tensor.numpy() for name, tensor in zip_strict(self.names, item)}

    in_32_bits = {"avx512_vnni", "avx_vnni", "amx_int8"}  # extensions that sum products of 8-bit numbers so
    saturates = on_cpu and platform.machine() == "x86_64" and not in_32_bits & cpu_features()
    logging.getLogger("root").setLevel(logging.ERROR)  # the quantiser logs advice to the root logger
    target = engine.request.work_dir / f"{engine.name}-int8.onnx"
    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(str(engine.onnx_file()), str(prepared), skip_symbolic_shape=True)
    inputs = onnx.load(prepared, load_external_data=False).graph.input
    quantize_static(
        str(prepared),
        str(target),
        Reader(engine.named("inputs", [tensor.name for tensor in inputs])),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=saturates,
    )
    prepared.unlink()
    return target, {"weight_bits": "7 (the CPU has no VNNI)" if saturates else "8"}
