"""Count the floating-point operations of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from paddle import Tensor, nn

from accelmark.frameworks.paddle.layers import Attention, TiedProjection


def count_flops(model: nn.Layer, loss: Callable[[], Tensor]) -> float:
    """Return the FLOPs of the matrix products and convolutions that ``loss`` computes with ``model``, and of backward.

    A multiply-add is two operations. Backward has a product for each factor that needs a gradient. Products outside the
    layers in ``_FORWARD`` are not seen.
    """
    counts: list[float] = []

    def record(layer: nn.Layer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        needs_input_gradient = not inputs[0].stop_gradient
        counts.append(_FORWARD[type(layer)](layer, inputs, output) * (3 if needs_input_gradient else 2))

    hooks = [
        layer.register_forward_post_hook(record)
        for layer in model.sublayers(include_self=True)
        if type(layer) in _FORWARD
    ]
    was_training = model.training
    # Evaluation mode: running statistics stay, and no random numbers are drawn.
    model.eval()
    try:
        loss()
    finally:
        for hook in hooks:
            hook.remove()
        if was_training:
            model.train()
    return sum(counts)


def _linear(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    return float(2.0 * math.prod(output.shape) * layer.weight.shape[0])


def _convolution(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    return float(2.0 * math.prod(output.shape) * math.prod(layer.weight.shape[1:]))


def _tied(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    return float(2.0 * math.prod(output.shape) * inputs[1].shape[1])


def _attention(layer: Any, inputs: tuple[Any, ...], output: Any) -> float:
    """Return the FLOPs of the score and value products; a causal mask does not reduce them."""
    return float(2 * 2.0 * math.prod(output.shape) * inputs[1].shape[1])


_FORWARD: Final[dict[type, Callable[[Any, tuple[Any, ...], Any], float]]] = {
    nn.Linear: _linear,
    nn.Conv2D: _convolution,
    TiedProjection: _tied,
    Attention: _attention,
}
"""Layer -> FLOPs of its forward pass."""
