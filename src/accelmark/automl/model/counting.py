"""Analytic operation counts of networks in two modes; ``docs/reference/automl.md`` compares them by layer.

Unit costs in both: add, multiply, compare 1; multiply-accumulate 2; divide, square root 4; exponential 8.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from math import prod
from typing import Final, Literal, get_args

from accelmark.automl.model import graph
from accelmark.automl.model.graph import INPUT, Layer, Network, Shape, infer_shapes, parameter_shapes

Mode = Literal["aiperf-v1", "accelmark"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
_UPDATE_PER_PARAMETER: Final = 4
"""Momentum: multiply, add; step: multiply, subtract."""
_AIPERF_BATCH_NORM_BACKWARD: Final = 36


@dataclass(frozen=True)
class Operations:
    """Operations for one image, except ``update``, which is for one optimizer step (0 in aiperf-v1).

    ``matrix_forward`` and ``matrix_backward`` are multiply-accumulates of convolutions and dense layers;
    ``update_in_backward`` is the weight update per image of aiperf-v1.
    """

    forward: int
    evaluation: int
    backward: int
    update: int
    matrix_forward: int
    matrix_backward: int
    update_in_backward: int
    parameters: int

    @property
    def matrix(self) -> int:
        """Multiply-accumulate work of training one image: what ``torch.utils.flop_counter`` counts."""
        return self.matrix_forward + self.matrix_backward


@dataclass(frozen=True, kw_only=True)
class LayerCount(Operations):
    """Operations of one layer."""

    name: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class NetworkCount(Operations):
    """Operations of a whole network in one mode, and of each of its layers."""

    mode: Mode
    network: str
    layers: tuple[LayerCount, ...]


def count(network: Network, mode: Mode) -> NetworkCount:
    """Count every layer of a network; raises SpecError where it cannot be built."""
    shapes = infer_shapes(network)
    readers = Counter(source for node in network.nodes for source in node.inputs)
    trained = {INPUT: False}
    counted: list[LayerCount] = []
    for node in network.nodes:
        layer, source, result = node.layer, shapes[node.inputs[0]], shapes[node.name]
        input_gradient = any(trained[name] for name in node.inputs)
        arrays = parameter_shapes(layer, source[0])
        parameters = sum(prod(shape) for name, shape in arrays.items() if not name.startswith("running_"))
        weights = prod(arrays["weight"]) if isinstance(layer, graph.Convolution | graph.Dense) else 0
        matrix = 2 * prod(result[1:]) * weights
        matrix_backward = (2 if input_gradient else 1) * matrix
        update = update_in_backward = 0
        if mode == "aiperf-v1":
            forward, backward, update_in_backward = _aiperf_v1(layer, source, result, matrix, matrix_backward, weights)
            evaluation, backward = forward, backward + update_in_backward
        else:
            forward, evaluation, backward = _accelmark(layer, source, result, len(node.inputs))
            if not input_gradient and not matrix:  # only a batch norm before the first weights has gradients, its own
                backward = 5 * prod(result) if isinstance(layer, graph.BatchNorm) else 0
            if input_gradient or parameters:
                backward += max(readers[node.name] - 1, 0) * prod(result)
            forward, evaluation, backward = forward + matrix, evaluation + matrix, backward + matrix_backward
            update = _UPDATE_PER_PARAMETER * parameters
        values = (forward, evaluation, backward, update, matrix, matrix_backward, update_in_backward, parameters)
        counted.append(LayerCount(*values, name=node.name, kind=layer.kind))
        trained[node.name] = input_gradient or parameters > 0
    totals = (sum(getattr(one, field.name) for one in counted) for field in fields(Operations))
    return NetworkCount(*totals, mode=mode, network=network.name, layers=tuple(counted))


def _aiperf_v1(
    layer: Layer, source: Shape, result: Shape, matrix: int, matrix_backward: int, weights: int
) -> tuple[int, int, int]:
    """Return forward, backward and update per image by AIPerf's table exactly, including its undercounts.

    Layers that the table lacks: average pooling costs k^2 + 3 per output value, flatten and dropout cost 0.
    """
    values = prod(result)
    match layer:
        case graph.Convolution():
            return matrix, matrix_backward, 2 * weights
        case graph.Dense():
            return matrix, 2 * matrix, 2 * (source[0] + 1) * layer.units
        case graph.BatchNorm():
            return 7 * values, _AIPERF_BATCH_NORM_BACKWARD, 0
        case graph.ReLU() | graph.Add():
            return values, 0, 0
        case graph.MaxPool():
            return prod(source) * layer.kernel**2 // layer.stride**2, 0, 0
        case graph.AveragePool():
            return values * (layer.kernel**2 - 1 + 4), 0, 0
        case graph.GlobalPool():
            return (source[1] * source[2] - 1 + 4) * source[0], 0, 0
        case graph.Softmax():
            return (8 + 1 + 4) * source[0] - 1, 0, 0
    return 0, 0, 0


def _accelmark(layer: Layer, source: Shape, result: Shape, num_inputs: int) -> tuple[int, int, int]:
    """Return forward, evaluation and backward without matrix work: AIPerf's table with its errors corrected."""
    values = prod(result)
    match layer:
        case graph.Convolution(bias=True) | graph.Dense(bias=True) | graph.ReLU():
            return values, values, values
        case graph.BatchNorm():
            # Training: mean 1, variance 3, normalize 2, scale and shift 2. Backward: normalized value again 2,
            # gradients of shift 1, of scale 2, of the input 4.
            return 8 * values, 2 * values, 9 * values
        case graph.Dropout():
            return (2 * values, 0, values) if layer.rate > 0 else (0, 0, 0)
        case graph.Add():
            forward, backward = (num_inputs - 1) * values, 0
        case graph.MaxPool():
            forward, backward = (layer.kernel**2 - 1) * values, values
        case graph.AveragePool():
            forward, backward = (layer.kernel**2 - 1 + 4) * values, (layer.kernel**2 + 4) * values
        case graph.GlobalPool():
            forward, backward = (source[1] * source[2] - 1 + 4) * source[0], 4 * source[0]
        case graph.Softmax():
            forward, backward = 15 * source[0] - 2, source[0]
        case _:
            return 0, 0, 0
    return forward, forward, backward
