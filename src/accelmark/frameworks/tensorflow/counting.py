"""Count the floating-point operations of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

_CALLS: Final = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "Case")
_PRODUCTS: Final = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


def count_flops(function: Any) -> float:
    """Return the FLOPs of the matrix products and convolutions of a concrete ``tf.function``, without running it.

    A multiply-add is two. Other operations are not counted, as in PyTorch's ``FlopCounterMode``.

    Raises:
        ValueError: an operation has a shape that is not known before it runs, or a graph of its own.
    """
    return sum(_flops(operation) for operation in _needed(function.graph.outputs))


def _needed(outputs: Any) -> set[Any]:
    """Return the operations that the outputs depend on; the others of a graph are not run."""
    found: set[Any] = set()
    waiting = [tensor.op for tensor in outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
    return found


def _flops(operation: Any) -> float:
    if operation.type in _CALLS:
        raise ValueError(f"{operation.name} has a graph of its own")
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
    **dict.fromkeys(_PRODUCTS, _product),
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv2DBackpropInput": _input_gradient,
    "Conv2DBackpropFilter": _kernel_gradient,
}
