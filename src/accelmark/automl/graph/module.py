"""A network as an executable PyTorch module, and its weights as plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accelmark.automl.graph.layers import (
    Add,
    AveragePool,
    BatchNorm,
    Concat,
    Convolution,
    Dense,
    Dropout,
    Flatten,
    GlobalPool,
    Layer,
    MaxPool,
    ReLU,
    Softmax,
)
from accelmark.automl.graph.network import INPUT, Network
from accelmark.automl.graph.shapes import Shape, infer_shapes

Array = NDArray[np.float32]
Weights = Mapping[str, Array]

_COUNTER: Final = "num_batches_tracked"


class Sum(nn.Module):
    """The sum of its inputs."""

    def forward(self, *sources: Tensor) -> Tensor:
        """Add up tensors of one shape."""
        total = sources[0]
        for source in sources[1:]:
            total = total + source
        return total


class Join(nn.Module):
    """Its inputs side by side along the channels."""

    def forward(self, *sources: Tensor) -> Tensor:
        """Concatenate along axis 1."""
        return torch.cat(sources, dim=1)


class GlobalMean(nn.Module):
    """The mean of each channel."""

    def forward(self, source: Tensor) -> Tensor:
        """Average over height and width."""
        return source.mean(dim=(2, 3))


def _convolution(layer: Convolution, source: Shape) -> nn.Module:
    return nn.Conv2d(
        source[0], layer.filters, layer.kernel, stride=layer.stride, padding=layer.padding, bias=layer.bias
    )


def _batch_norm(layer: BatchNorm, source: Shape) -> nn.Module:
    kind = nn.BatchNorm2d if len(source) == 3 else nn.BatchNorm1d
    return kind(source[0], eps=layer.epsilon)


def _build(layer: Layer, source: Shape) -> nn.Module:
    match layer:
        case Convolution():
            return _convolution(layer, source)
        case BatchNorm():
            return _batch_norm(layer, source)
        case ReLU():
            return nn.ReLU()
        case Add():
            return Sum()
        case Concat():
            return Join()
        case MaxPool():
            return nn.MaxPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case AveragePool():
            return nn.AvgPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case GlobalPool():
            return GlobalMean()
        case Dense():
            return nn.Linear(source[0], layer.units, bias=layer.bias)
        case Dropout():
            return nn.Dropout(layer.rate)
        case Flatten():
            return nn.Flatten()
        case Softmax():
            return nn.Softmax(dim=1)


class GraphModule(nn.Module):
    """Executes exactly the nodes of ``network``, in their order.

    Calling it gives the class scores that the softmax reads, as cross-entropy wants them; ``probabilities``
    applies the softmax too. Convolutions are initialised by He's rule (fan-out), the rest as PyTorch does.
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
        """Return class scores, shape (batch, classes), of images (batch, channels, height, width)."""
        return self.observe(images, None)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return class probabilities, shape (batch, classes)."""
        scores: Tensor = self.layers[self.network.output](self(images))
        return scores

    def observe(self, images: Tensor, see: Callable[[str, Tensor], None] | None) -> Tensor:
        """Run the network and show every node's output to ``see`` as it is computed."""
        values: dict[str, Tensor] = {INPUT: images}
        result = images
        for node in self.network.nodes[:-1]:
            result = self.layers[node.name](*[values[source] for source in node.inputs])
            values[node.name] = result
            for source in node.inputs:
                if self._last_use[source] == node.name:
                    values.pop(source, None)
            if see is not None:
                see(node.name, result)
        return result


def to_weights(module: GraphModule) -> dict[str, Array]:
    """Copy parameters and running statistics out of a module, keyed ``<node>.<name>``, as float32 arrays."""
    return {
        key.removeprefix("layers."): value.detach().to("cpu", torch.float32).numpy().copy()
        for key, value in module.state_dict().items()
        if not key.endswith(_COUNTER)
    }


def load_weights(module: GraphModule, weights: Weights) -> None:
    """Copy arrays into a module; KeyError or ValueError when names or shapes are not the module's own."""
    state = {key: value for key, value in module.state_dict().items() if not key.endswith(_COUNTER)}
    wanted = {key.removeprefix("layers.") for key in state}
    if wanted != set(weights):
        raise KeyError(f"weights differ from the network's: {sorted(wanted ^ set(weights))[:6]}")
    with torch.no_grad():
        for key, target in state.items():
            array = weights[key.removeprefix("layers.")]
            if tuple(target.shape) != array.shape:
                raise ValueError(f"{key}: shape {array.shape}, the network has {tuple(target.shape)}")
            target.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def channel_statistics(module: GraphModule, images: Tensor, names: Sequence[str]) -> dict[str, tuple[Array, Array]]:
    """Return mean and (biased) variance per channel of the named nodes' outputs, in training mode.

    The module's running statistics are left as they were. Used to give an inserted batch norm the scale and
    shift that undo its own normalisation.
    """
    kept = {key: value.clone() for key, value in module.state_dict().items()}
    was_training = module.training
    found: dict[str, tuple[Array, Array]] = {}

    def see(name: str, value: Tensor) -> None:
        if name in names:
            axes = tuple(axis for axis in range(value.dim()) if axis != 1)
            variance, mean = torch.var_mean(value.float(), dim=axes, correction=0)
            found[name] = (mean.cpu().numpy(), variance.cpu().numpy())

    module.train()
    with torch.no_grad():
        module.observe(images, see)
        module.load_state_dict(kept)
    module.train(was_training)
    return found
