"""Read the types that an ONNX graph computes in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import onnx

_TYPES: Final = {
    onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.INT8: "int8", onnx.TensorProto.UINT8: "int8",
    onnx.TensorProto.INT4: "int4", onnx.TensorProto.UINT4: "int4", onnx.TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
}  # fmt: skip
_MATRIX_WORDS: Final = ("Conv", "MatMul", "Gemm", "Attention")
_PASSED: Final = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Identity", "Reshape"})
"""Operators between stored weights and the operator that uses them. A ``Cast`` is not one: it changes the type."""


def matrix_types(path: Path) -> dict[str, int] | None:
    """Return {type of the weights: number of matrix products and convolutions}; None where there are none.

    The type is that of stored weights, also through operators that dequantise them, because runtimes compute those in
    the quantised type.
    """
    graph = onnx.load(str(path), load_external_data=False).graph
    stored = {each.name: each.data_type for each in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            stored[node.output[0]] = node.attribute[0].t.data_type
        elif node.op_type in _PASSED and node.input and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
    found: Counter[str] = Counter()
    for node in graph.node:
        if any(word in node.op_type for word in _MATRIX_WORDS):
            # In quantised operators the first two stored inputs may be scales, which are single numbers.
            weights = [stored[name] for name in node.input if name in stored]
            quantised = [each for each in weights if _TYPES.get(each, "").startswith("int")]
            if weights:
                kind = (quantised or weights)[0]
                found[_TYPES.get(kind, onnx.TensorProto.DataType.Name(kind).lower())] += 1
    return dict(found) or None
