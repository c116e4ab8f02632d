"""Analytic operation counts of networks in two modes; ``docs/automl.md`` compares the formulas layer by layer.

Unit costs in both: add, multiply, compare 1; multiply-accumulate 2; divide, square root 4; exponential 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Final, Literal, get_args

from accelmark.automl.model import layers
from accelmark.automl.model.layers import Shape
from accelmark.automl.model.network import INPUT, Network, Node, infer_shapes

Mode = Literal["aiperf-v1", "accelmark"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
UPDATE_PER_PARAMETER: Final = 4
"""Momentum: multiply, add; step: multiply, subtract."""
_AIPERF_BATCH_NORM_BACKWARD: Final = 36


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Operations for one image, except ``update``, which is for one optimizer step.

    forward             while training
    evaluation          forward while evaluating
    backward            in mode aiperf-v1 with that mode's weight update per image
    update              per optimizer step, for any batch size (0 in aiperf-v1)
    matrix_forward      the part of ``forward`` that is multiply-accumulates of convolutions and dense layers
    matrix_backward     the same part of ``backward``
    update_in_backward  the part of ``backward`` that is weight update (0 in accelmark)
    parameters          trainable parameters
    """

    forward: int = 0
    evaluation: int = 0
    backward: int = 0
    update: int = 0
    matrix_forward: int = 0
    matrix_backward: int = 0
    update_in_backward: int = 0
    parameters: int = 0

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

    def forward_by_kind(self) -> dict[str, int]:
        """Forward operations per kind of layer."""
        parts: dict[str, int] = {}
        for layer in self.layers:
            parts[layer.kind] = parts.get(layer.kind, 0) + layer.forward
        return parts


def count(network: Network, mode: Mode) -> NetworkCount:
    """Count every layer of a network; raises NetworkError where it cannot be built."""
    shapes = infer_shapes(network)
    readers: dict[str, int] = {}
    for node in network.nodes:
        for source in node.inputs:
            readers[source] = readers.get(source, 0) + 1
    formulas = _aiperf_v1 if mode == "aiperf-v1" else _accelmark
    trained: dict[str, bool] = {INPUT: False}
    layers: list[LayerCount] = []
    for node in network.nodes:
        behind = any(trained[source] for source in node.inputs)
        shape = shapes[node.inputs[0]], shapes[node.name]
        values = formulas(node, *shape, input_gradient=behind, readers=readers.get(node.name, 0))
        layers.append(LayerCount(name=node.name, kind=node.layer.kind, **values))
        trained[node.name] = behind or layers[-1].parameters > 0
    totals = {field.name: sum(getattr(one, field.name) for one in layers) for field in fields(Operations)}
    return NetworkCount(mode=mode, network=network.name, layers=tuple(layers), **totals)


def _matrix(node: Node, source: Shape, result: Shape) -> tuple[int, int]:
    """Return multiply-accumulate operations of the forward pass, and weights without biases."""
    match node.layer:
        case layers.Convolution(kernel=kernel, filters=filters):
            weights = kernel**2 * source[0] * filters
            return 2 * result[1] * result[2] * weights, weights
        case layers.Dense(units=units):
            return 2 * source[0] * units, source[0] * units
    return 0, 0


def _parameters(node: Node, result: Shape, weights: int) -> int:
    match node.layer:
        case layers.Convolution(bias=bias) | layers.Dense(bias=bias):
            return weights + (result[0] if bias else 0)
        case layers.BatchNorm():
            return 2 * result[0]
    return 0


def _aiperf_v1(node: Node, source: Shape, result: Shape, *, input_gradient: bool, readers: int) -> Mapping[str, Any]:
    """Count by AIPerf's table exactly, including its undercounts.

    Layers that the table lacks: average pooling costs k^2 + 3 per output value, flatten and dropout cost 0.
    """
    del readers  # AIPerf does not count the sum of gradients of a tensor that several layers read
    matrix, weights = _matrix(node, source, result)
    forward, values, layer = matrix, prod(result), node.layer
    matrix_backward = (2 if input_gradient else 1) * matrix
    backward, update = matrix_backward, 0
    match layer:
        case layers.Convolution():
            update = 2 * weights
        case layers.Dense():
            backward, update = 2 * matrix, 2 * (source[0] + 1) * layer.units
        case layers.BatchNorm():
            forward, backward = 7 * values, _AIPERF_BATCH_NORM_BACKWARD
        case layers.ReLU() | layers.Add():
            forward = values
        case layers.MaxPool():
            forward = prod(source) * layer.kernel**2 // layer.stride**2
        case layers.AveragePool():
            forward = values * (layer.kernel**2 - 1 + 4)
        case layers.GlobalPool():
            forward = (source[1] * source[2] - 1 + 4) * source[0]
        case layers.Softmax():
            forward = (8 + 1 + 4) * source[0] - 1
    return {
        "forward": forward,
        "evaluation": forward,
        "backward": backward + update,
        "matrix_forward": matrix,
        "matrix_backward": matrix_backward,
        "update_in_backward": update,
        "parameters": _parameters(node, result, weights),
    }


def _accelmark(node: Node, source: Shape, result: Shape, *, input_gradient: bool, readers: int) -> Mapping[str, Any]:
    """Count by AIPerf's table with omissions added and double counts removed.

    ``input_gradient``: a layer before this one has weights. ``readers``: number of inputs that read the output.
    """
    matrix, weights = _matrix(node, source, result)
    parameters, layer, values = _parameters(node, result, weights), node.layer, prod(result)
    forward = backward = 0
    evaluation: int | None = None
    match layer:
        case layers.Convolution(bias=True) | layers.Dense(bias=True):
            forward = backward = values
        case layers.BatchNorm():
            # Training: mean 1, variance 3, normalize 2, scale and shift 2. Backward: normalized value again 2,
            # gradients of shift 1, of scale 2, of the input 4.
            forward, evaluation, backward = 8 * values, 2 * values, 9 * values
        case layers.ReLU():
            forward = backward = values
        case layers.Add():
            forward = (len(node.inputs) - 1) * values
        case layers.MaxPool():
            forward, backward = (layer.kernel**2 - 1) * values, values
        case layers.AveragePool():
            forward, backward = (layer.kernel**2 - 1 + 4) * values, (layer.kernel**2 + 4) * values
        case layers.GlobalPool():
            forward, backward = (source[1] * source[2] - 1 + 4) * source[0], 4 * source[0]
        case layers.Dropout():
            forward, evaluation, backward = (2 * values, 0, values) if layer.rate > 0 else (0, 0, 0)
        case layers.Softmax():
            forward, backward = 15 * source[0] - 2, source[0]
    if not input_gradient and not matrix:  # before the first weighted layer only a batch norm has gradients, its own
        backward = 5 * values if isinstance(layer, layers.BatchNorm) else 0
    if input_gradient or parameters:
        backward += max(readers - 1, 0) * values
    matrix_backward = (2 if input_gradient else 1) * matrix
    return {
        "forward": forward + matrix,
        "evaluation": (forward if evaluation is None else evaluation) + matrix,
        "backward": backward + matrix_backward,
        "update": UPDATE_PER_PARAMETER * parameters,
        "matrix_forward": matrix,
        "matrix_backward": matrix_backward,
        "parameters": parameters,
    }
