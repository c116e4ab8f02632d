"""AccelMark's operation count: AIPerf's, with what it left out counted and what it counted twice taken back.

Unit costs are the same (add, multiply, compare 1; multiply-accumulate 2; divide, square root 4;
exponential 8). HWC is the number of values of a layer's output. For one image, ``aiperf-v1 -> accelmark``:

- convolution with bias: nothing -> forward + HWC, backward + HWC (adding it, summing its gradient).
- dense with bias: in the update only -> forward + out, backward + out.
- dense as first weighted layer: input gradient counted -> not counted; it is never computed.
- update: 2 per weight per *image*, inside backward -> 4 per parameter per optimiser *step*, apart
  (momentum: multiply, add; step: multiply, subtract); biases and batch norms too.
- batch norm forward: 7 HWC always -> 8 HWC training (mean 1, variance 3, normalise 2, scale and shift 2),
  2 HWC evaluating (one multiply, one add).
- batch norm backward: 36, a constant -> 9 HWC (normalised value again 2, shift's gradient 1, scale's 2,
  input's 4).
- ReLU backward: 0 -> HWC (one select a value).
- add of n inputs: HWC -> (n - 1) HWC; backward is free, the gradient passes through.
- max pool forward: input HWC k^2 / s^2 -> HWC (k^2 - 1), since k^2 values take k^2 - 1 compares;
  backward: 0 -> HWC (each gradient is added to its winner).
- average pool backward: 0 -> HWC (k^2 + 4) (divide once, add to each place of the window).
- global pool backward: 0 -> 4 C (one division a channel; spreading is copying).
- dropout: 0 -> 2 HWC forward while training (compare, scale), HWC backward, 0 evaluating.
- softmax: 13 n - 1 -> 15 n - 2 forward (the largest is found and taken off first), n backward (p - y).
- a tensor read r times: 0 -> (r - 1) HWC backward; its gradients are summed.
"""

from __future__ import annotations

from math import prod

from accelmark.automl.counting.tally import LayerCount
from accelmark.automl.graph import (
    Add,
    AveragePool,
    BatchNorm,
    Convolution,
    Dense,
    Dropout,
    GlobalPool,
    MaxPool,
    Node,
    ReLU,
    Shape,
    Softmax,
)

UPDATE_PER_PARAMETER = 4


def count_layer(node: Node, source: Shape, result: Shape, *, input_gradient: bool, readers: int) -> LayerCount:
    """Count one layer; ``readers`` is how many inputs of other nodes its output feeds.

    ``input_gradient`` is False where nothing before the layer has weights.
    """
    layer, values = node.layer, prod(result)
    forward = backward = matrix = parameters = 0
    evaluation: int | None = None
    match layer:
        case Convolution():
            weights = layer.kernel**2 * source[0] * layer.filters
            matrix = 2 * result[1] * result[2] * weights
            forward = backward = values if layer.bias else 0
            parameters = weights + (layer.filters if layer.bias else 0)
        case Dense():
            matrix = 2 * source[0] * layer.units
            forward = backward = layer.units if layer.bias else 0
            parameters = (source[0] + (1 if layer.bias else 0)) * layer.units
        case BatchNorm():
            forward, evaluation, backward, parameters = 8 * values, 2 * values, 9 * values, 2 * result[0]
        case ReLU():
            forward = backward = values
        case Add():
            forward = (len(node.inputs) - 1) * values
        case MaxPool():
            forward, backward = (layer.kernel**2 - 1) * values, values
        case AveragePool():
            forward, backward = (layer.kernel**2 - 1 + 4) * values, (layer.kernel**2 + 4) * values
        case GlobalPool():
            forward, backward = (source[1] * source[2] - 1 + 4) * source[0], 4 * source[0]
        case Dropout():
            forward, evaluation, backward = (2 * values, 0, values) if layer.rate > 0 else (0, 0, 0)
        case Softmax():
            forward, backward = 15 * source[0] - 2, source[0]
        case _:
            pass
    matrix_backward = (2 if input_gradient else 1) * matrix
    if not input_gradient and not matrix:
        backward = _weight_gradients_only(node, values)
    if input_gradient or parameters:
        backward += max(readers - 1, 0) * values
    return LayerCount(
        name=node.name,
        kind=layer.kind,
        forward=forward + matrix,
        evaluation=(forward if evaluation is None else evaluation) + matrix,
        backward=backward + matrix_backward,
        update=UPDATE_PER_PARAMETER * parameters,
        matrix_forward=matrix,
        matrix_backward=matrix_backward,
        parameters=parameters,
    )


def _weight_gradients_only(node: Node, values: int) -> int:
    """Backward of a layer before the first weighted one: only a batch norm there has gradients, its own."""
    return 5 * values if isinstance(node.layer, BatchNorm) else 0
