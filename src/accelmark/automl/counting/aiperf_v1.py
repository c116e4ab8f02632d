"""AIPerf v1.0's operation count, to the last operation, undercounts included.

Unit costs: add, multiply, compare 1; multiply-accumulate 2; divide and square root 4; exponential 8. The
formulas are those of AIPerf's operation table; ``counting.accelmark`` lists where they fall short. Layers
that AIPerf does not know (average pooling windows, flatten) cost: (k^2 - 1) + 4 per output value, and
nothing.
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
    GlobalPool,
    MaxPool,
    Node,
    ReLU,
    Shape,
    Softmax,
)

BATCH_NORM_BACKWARD = 36


def count_layer(node: Node, source: Shape, result: Shape, *, input_gradient: bool, readers: int) -> LayerCount:
    """Count one layer; ``source`` and ``result`` are its input and output shapes.

    ``input_gradient`` is False where nothing before the layer has weights: the first convolution.
    """
    del readers  # AIPerf does not count the summing of gradients where a tensor is read twice
    layer = node.layer
    forward = backward = matrix_forward = matrix_backward = update = parameters = 0
    match layer:
        case Convolution():
            weights = layer.kernel**2 * source[0] * layer.filters
            places = result[1] * result[2]
            forward = matrix_forward = 2 * places * weights
            matrix_backward = (4 if input_gradient else 2) * places * weights
            update = 2 * weights
            backward = matrix_backward + update
            parameters = weights + (layer.filters if layer.bias else 0)
        case Dense():
            forward = matrix_forward = 2 * source[0] * layer.units
            matrix_backward = 4 * source[0] * layer.units
            update = 2 * (source[0] + 1) * layer.units
            backward = matrix_backward + update
            parameters = (source[0] + (1 if layer.bias else 0)) * layer.units
            if not input_gradient:
                matrix_backward = forward
        case BatchNorm():
            forward, backward, parameters = 7 * prod(result), BATCH_NORM_BACKWARD, 2 * result[0]
        case ReLU() | Add():
            forward = prod(result)
        case MaxPool():
            forward = prod(source) * layer.kernel**2 // layer.stride**2
        case AveragePool():
            forward = prod(result) * (layer.kernel**2 - 1 + 4)
        case GlobalPool():
            forward = (source[1] * source[2] - 1) * source[0] + 4 * source[0]
        case Softmax():
            forward = 8 * source[0] + (source[0] - 1) + 4 * source[0]
        case _:
            pass
    return LayerCount(
        name=node.name,
        kind=layer.kind,
        forward=forward,
        evaluation=forward,
        backward=backward,
        matrix_forward=matrix_forward,
        matrix_backward=matrix_backward,
        update_in_backward=update,
        parameters=parameters,
    )
