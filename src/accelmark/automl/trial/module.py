"""A network in PyTorch: as a module, its weights as arrays, and as a case of the training driver."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelmark.automl.dataset import Dataset
from accelmark.automl.messages import TrainedWeights, TrialListener, TrialOrder
from accelmark.automl.model import layers
from accelmark.automl.model.counting import count
from accelmark.automl.model.morphs import apply_morph
from accelmark.automl.model.network import INPUT, Network, infer_shapes
from accelmark.automl.model.weights import Array, Weights, carry_weights, fitted_weights
from accelmark.automl.records import WeightMode
from accelmark.datasets.images import Images
from accelmark.frameworks.pytorch.batches import TORCH
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase
from accelmark.train.batches import Share

_CALIBRATION_IMAGES: Final = 256


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
        return {key: value for key, value in self.layers.state_dict().items() if "num_batches_tracked" not in key}


def to_weights(module: GraphModule) -> dict[str, Array]:
    """Copy parameters and running statistics into float32 arrays."""
    return {key: value.detach().to("cpu", torch.float32).numpy().copy() for key, value in module.named_arrays().items()}


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


@final
class ImageBatches:
    """One rank's share of a set of images; training images are augmented."""

    def __init__(self, images: Images, batch_size: int, place: Place, *, train: bool) -> None:
        self._images, self._place, self._train = images, place, train
        self._share = Share(len(images), batch_size, place, train)
        self.num_samples = self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield raw images (uint8) and labels from batch ``skip`` on.

        Their order depends on seed and epoch, augmentation also on the rank.
        """
        place = self._place
        generator = np.random.default_rng([place.shared_seed, number, place.rank]) if self._train else None
        for position, indices in enumerate(self._share.indices(TORCH.permutation, number)):
            pixels = np.ascontiguousarray(self._images.batch(indices, generator))
            if position >= skip:
                yield {"images": torch.from_numpy(pixels), "labels": torch.from_numpy(self._images.labels[indices])}


@dataclass(frozen=True)
class TrialInput:
    """What a trial is given; ``weights`` are those of the order's parent network, None: from scratch."""

    data: Dataset
    order: TrialOrder
    weights: TrainedWeights
    listener: TrialListener


@final
class TrialCase(TrainCase):
    """One trial's network. Images are scaled on the device, so that they are transferred as bytes."""

    def __init__(self, given: TrialInput, *args: Any) -> None:
        super().__init__(*args)
        self._given: Final = given
        self.started_from: WeightMode = "from-scratch"
        self.module: GraphModule | None = None
        """The trained network without wrappers, once it is built."""
        self._mean, self._deviation = (
            torch.tensor(values, device=self.place.device).view(1, -1, 1, 1)
            for values in (given.data.mean, given.data.deviation)
        )

    def build_model(self) -> nn.Module:
        """Build the network, with its parent's weights where there are any, carried through the order's morphs."""
        order, network, carried = self._given.order, self._given.order.parent_network, self._given.weights
        self.module = GraphModule(order.network)
        if network is None or carried is None:
            return self.module
        for morph in order.morphs:
            statistics = self._statistics(network, carried, morph.at) if morph.kind == "deepen" else None
            child = apply_morph(network, morph)
            carried = carry_weights(network, child, morph, carried, statistics)
            network = child
        load_weights(self.module, fitted_weights(order.network, carried))
        self.started_from = "carried"
        return self.module

    def _statistics(self, network: Network, weights: Weights, at: str) -> tuple[Array, Array]:
        """Return mean and variance of the output of node ``at`` for training images."""
        module = GraphModule(network)
        load_weights(module, weights)
        indices = np.arange(min(_CALIBRATION_IMAGES, len(self._given.data.training)))
        images = torch.from_numpy(self._given.data.training.batch(indices, None))
        return channel_statistics(module, self._scaled(images), at)

    def train_batches(self) -> ImageBatches:
        """Return this rank's share of the training images."""
        return ImageBatches(self._given.data.training, self.settings.batch_size, self.place, train=True)

    def eval_batches(self) -> ImageBatches:
        """Return this rank's share of the validation images."""
        return ImageBatches(self._given.data.validation, self.settings.eval_batch_size, self.place, train=False)

    def held_out_batches(self) -> ImageBatches:
        """Return this rank's share of the held-out images."""
        return ImageBatches(self._given.data.held_out, self.settings.eval_batch_size, self.place, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return black images, with which the driver counts operations."""
        images = torch.zeros(size, *self._given.order.network.input_shape, dtype=torch.uint8)
        return {"images": images, "labels": torch.zeros(size, dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the smoothed cross-entropy, and report the images of all ranks to the listener."""
        scores: Tensor = model(self._scaled(batch["images"]))
        smoothing = self._given.order.training.label_smoothing
        loss = cross_entropy(scores.float(), batch["labels"], label_smoothing=smoothing)
        if not loss.is_meta:
            self._given.listener.report(len(scores) * self.place.world_size)
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of cross-entropy, correct predictions and images."""
        scores, labels = model(self._scaled(batch["images"])), batch["labels"]
        self._given.listener.report(len(scores) * self.place.world_size)
        return {
            "loss": cross_entropy(scores.float(), labels, reduction="sum"),
            "correct": (scores.argmax(dim=1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy, mean loss, and the number of images."""
        number = sums["count"]
        return {"accuracy": sums["correct"] / number, "loss": sums["loss"] / number, "count": number}

    def flops_per_sample(self) -> float:
        """Return the scored matrix work of one image, forward and backward."""
        return float(count(self._given.order.network, "accelmark").matrix)

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean.to(images.device)) / self._deviation.to(images.device)
