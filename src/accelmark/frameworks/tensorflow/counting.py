"""Count the floating-point operations of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

PRODUCTS: Final = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


def count_flops(function: Any) -> float:
    """Return the FLOPs of the matrix products and convolutions of a concrete ``tf.function``, without running it.

    A multiply-add is two. Other operations are not counted, as in PyTorch's ``FlopCounterMode``.

    Raises:
        ValueError: an operation has a shape that is not known before it runs.
    """
    inner = {each.name: each for each in function.graph._functions.values()}
    return sum(_flops(node) for node in _nodes(function.graph.get_operations(), inner))


def _nodes(operations: Any, inner: dict[Any, Any]) -> Iterator[Any]:
    for operation in operations:
        yield operation
        for name in ("f", "then_branch", "body"):
            called = operation.node_def.attr[name].func.name if name in operation.node_def.attr else ""
            graph = getattr(inner.get(called.encode()) or inner.get(called), "graph", None)
            if graph is not None:
                yield from _nodes(graph.get_operations(), inner)


def _flops(operation: Any) -> float:
    count = _COUNTS.get(operation.type)
    if count is None:
        return 0.0
    shapes = [tensor.shape for tensor in (*operation.inputs, operation.outputs[0])]
    if not all(shape.is_fully_defined() for shape in shapes):
        raise ValueError(f"{operation.name} has a shape that is known only when it runs")
    return 2.0 * count(operation, [shape.as_list() for shape in shapes])


def _product(operation: Any, shapes: list[list[int]]) -> float:
    left, _, out = shapes
    transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    return math.prod(out) * left[-2 if transposed else -1]


def _einsum(operation: Any, shapes: list[list[int]]) -> float:
    labels = operation.get_attr("equation").decode().partition("->")[0].split(",")
    sizes = {
        each: size
        for names, shape in zip(labels, shapes, strict=False)
        for each, size in zip(names, shape, strict=True)
    }
    return math.prod(sizes.values())


def _convolution(operation: Any, shapes: list[list[int]]) -> float:
    _, kernel, out = shapes
    return math.prod(out) * math.prod(kernel[:3])


def _input_gradient(operation: Any, shapes: list[list[int]]) -> float:
    """Return the multiply-adds of the forward convolution, which the gradient has too."""
    _, kernel, gradient, _ = shapes
    return math.prod(gradient) * math.prod(kernel[:3])


def _kernel_gradient(operation: Any, shapes: list[list[int]]) -> float:
    _, _, gradient, kernel = shapes
    return math.prod(gradient) * math.prod(kernel[:3])


_COUNTS: Final[dict[str, Callable[[Any, list[list[int]]], float]]] = {
    **dict.fromkeys(PRODUCTS, _product),
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv2DBackpropInput": _input_gradient,
    "Conv2DBackpropFilter": _kernel_gradient,
}
