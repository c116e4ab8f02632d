"""Count the floating-point operations of a traced function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the FLOPs of the matrix products and convolutions of ``function``, without running it.

    A multiply-add is two. Other operations are not counted, as in PyTorch's ``FlopCounterMode``. ``arguments`` may be
    ``jax.ShapeDtypeStruct``.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = math.prod(left[axis] for axis in contracted)
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        repeats = equation.params["length"] if name == "scan" else 1
        total += repeats * sum(_count(inner) for inner in _inner(equation.params))
    return total


def _convolution(equation: Any) -> float:
    """Return 2 K^2 C_in C_out HW N of a convolution, and the same for both of its gradients.

    The gradient for the inputs of a strided convolution dilates its input: products with inserted zeros do not count.
    """
    inputs: tuple[int, ...]
    kernel: tuple[int, ...]
    inputs, kernel = (variable.aval.shape for variable in equation.invars)
    output: tuple[int, ...] = equation.outvars[0].aval.shape
    layout: Any = equation.params["dimension_numbers"]
    taps: int = math.prod(kernel[axis] for axis in layout.rhs_spec[2:])
    if math.prod(equation.params["lhs_dilation"]) > 1:
        channels: float = output[layout.out_spec[1]] / equation.params["feature_group_count"]
        return 2.0 * math.prod(inputs) * taps * channels
    channels_in: int = kernel[layout.rhs_spec[1]]
    return 2.0 * math.prod(output) * taps * channels_in


def _inner(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner
