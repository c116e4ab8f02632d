"""Count the floating-point operations of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from mindspore import Tensor, nn

from accelmark.frameworks.mindspore.layers import CausalAttention


def count_flops(model: nn.Cell, loss: Callable[[], Tensor]) -> float:
    """Return the FLOPs of the matrix products and convolutions that ``loss`` computes with ``model``, and of backward.

    A multiply-add is two operations. Backward has a product for each factor that needs a gradient: the first layer's
    input needs none. Products outside the layers in ``_FORWARD`` are not seen.
    """
    counts: list[tuple[bool, float]] = []

    def record(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        counts.append((isinstance(layer, nn.Conv2d), _FORWARD[type(layer)](layer, inputs, output)))

    hooks = [layer.register_forward_hook(record) for _, layer in model.cells_and_names() if type(layer) in _FORWARD]
    model.set_train(False)  # running statistics stay, and no random numbers are drawn
    try:
        loss()
    finally:
        for hook in hooks:
            hook.remove()
        model.set_train()
    first_is_convolution, first = counts[0]
    # A convolution of images has an input without a gradient; a decoder's first product follows its embedding.
    return 3 * sum(count for _, count in counts) - (first if first_is_convolution else 0.0)


def _linear(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    return float(2.0 * math.prod(output.shape) * layer.weight.shape[1])


def _convolution(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    return float(2.0 * math.prod(output.shape) * math.prod(layer.weight.shape[1:]))


def _attention(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    """Return the FLOPs of the score and value products; the causal mask does not reduce them."""
    return float(2 * 2.0 * math.prod(output.shape) * inputs[1].shape[-2])


_FORWARD: Final[dict[type, Callable[[Any, tuple[Any, ...], Any], float]]] = {
    nn.Dense: _linear,
    nn.Conv2d: _convolution,
    CausalAttention: _attention,
}
"""Layer -> FLOPs of its forward pass."""
