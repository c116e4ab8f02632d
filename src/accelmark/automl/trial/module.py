"""A network as a PyTorch module, and its weights as arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from accelmark.automl.model import layers
from accelmark.automl.model.network import INPUT, Network, infer_shapes
from accelmark.automl.model.weights import Array, Weights


class _Apply(nn.Module):
    """Applies a function of all inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function: Final = function

    def forward(self, *sources: Tensor) -> Tensor:
        return self.function(*sources)


def _build(layer: layers.Layer, source: layers.Shape) -> nn.Module:
    match layer:
        case layers.Convolution(filters=filters, kernel=kernel):
            return nn.Conv2d(source[0], filters, kernel, layer.stride, layer.padding, bias=layer.bias)
        case layers.BatchNorm():
            return (nn.BatchNorm2d if len(source) == 3 else nn.BatchNorm1d)(source[0], eps=layer.epsilon)
        case layers.ReLU():
            return nn.ReLU()
        case layers.Add():
            return _Apply(lambda *sources: reduce(operator.add, sources))
        case layers.Concat():
            return _Apply(lambda *sources: torch.cat(sources, dim=1))
        case layers.MaxPool():
            return nn.MaxPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case layers.AveragePool():
            return nn.AvgPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case layers.GlobalPool():
            return _Apply(lambda image: image.mean(dim=(2, 3)))
        case layers.Dense():
            return nn.Linear(source[0], layer.units, bias=layer.bias)
        case layers.Dropout():
            return nn.Dropout(layer.rate)
        case layers.Flatten():
            return nn.Flatten()
        case layers.Softmax():
            return nn.Softmax(dim=1)


class GraphModule(nn.Module):
    """Executes the nodes of ``network`` in their order, except the final softmax: the output is class scores.

    Convolutions are initialized by He's rule (fan-out), other layers as PyTorch does.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        shapes = infer_shapes(network)
        self.network: Final = network
        self.layers = nn.ModuleDict({node.name: _build(node.layer, shapes[node.inputs[0]]) for node in network.nodes})
        self._last_use: Final = {source: node.name for node in network.nodes for source in node.inputs}
        for layer in self.layers.values():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes) of images (batch, channels, height, width)."""
        values: dict[str, Tensor] = {INPUT: images}
        for node in self.network.nodes[:-1]:
            values[node.name] = self.layers[node.name](*[values[source] for source in node.inputs])
            for source in set(node.inputs):
                if self._last_use[source] == node.name:
                    del values[source]
        return values[self.network.nodes[-1].inputs[0]]

    def named_arrays(self) -> dict[str, Tensor]:
        """Return parameters and running statistics by ``<node>.<name>``."""
        state = self.layers.state_dict().items()
        return {key: value for key, value in state if not key.endswith("num_batches_tracked")}


def to_weights(module: GraphModule) -> dict[str, Array]:
    """Copy parameters and running statistics into float32 arrays."""
    arrays = module.named_arrays().items()
    return {key: value.detach().to("cpu", torch.float32).numpy().copy() for key, value in arrays}


def load_weights(module: GraphModule, weights: Weights) -> None:
    """Copy arrays into a module; raises KeyError or ValueError where names or shapes differ."""
    state = module.named_arrays()
    if differing := sorted(set(state) ^ set(weights)):
        raise KeyError(f"weights differ from the network's: {differing[:6]}")
    with torch.no_grad():
        for key, target in state.items():
            if tuple(target.shape) != weights[key].shape:
                raise ValueError(f"{key}: shape {weights[key].shape}, the network has {tuple(target.shape)}")
            target.copy_(torch.from_numpy(np.ascontiguousarray(weights[key])))


def channel_statistics(module: GraphModule, images: Tensor, name: str) -> tuple[Array, Array]:
    """Return mean and biased variance per channel of a node's output in training mode; the module is left unchanged."""
    copied, outputs = deepcopy(module).train(), list[Tensor]()
    copied.layers[name].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    with torch.no_grad():
        copied(images)
    axes = tuple(axis for axis in range(outputs[0].dim()) if axis != 1)
    variance, mean = torch.var_mean(outputs[0].float(), dim=axes, correction=0)
    return mean.cpu().numpy(), variance.cpu().numpy()
