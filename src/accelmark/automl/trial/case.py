"""A network of the search as a case of the training driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelmark.automl.dataset import Dataset
from accelmark.automl.messages import TrainedWeights, TrialListener, TrialOrder
from accelmark.automl.model.counting import count
from accelmark.automl.model.morphs import apply_morph
from accelmark.automl.model.network import Network
from accelmark.automl.model.weights import Array, Weights, carry_weights, fitted_weights
from accelmark.automl.records import WeightMode
from accelmark.automl.trial.module import GraphModule, channel_statistics, load_weights
from accelmark.datasets.images import Images
from accelmark.frameworks.pytorch.batches import Shares
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase

_CALIBRATION_IMAGES: Final = 256


@final
class ImageBatches:
    """One rank's share of a set of images; training images are augmented."""

    def __init__(self, images: Images, batch_size: int, place: Place, *, train: bool) -> None:
        self._images, self._place, self._train = images, place, train
        self._shares = Shares(len(images), batch_size, place, train=train)
        self.num_samples = self._shares.num_samples

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield raw images (uint8) and labels; the order depends on seed and epoch, augmentation also on the rank."""
        place = self._place
        generator = np.random.default_rng([place.shared_seed, number, place.rank]) if self._train else None
        for share in self._shares.epoch(number):
            indices = share.numpy()
            pixels = np.ascontiguousarray(self._images.batch(indices, generator))
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
        scores = self._scores(model, batch)
        smoothing = self._given.order.training.label_smoothing
        loss = cross_entropy(scores.float(), batch["labels"], label_smoothing=smoothing)
        if not loss.is_meta:
            self._given.listener.report(len(scores) * self.place.world_size)
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of cross-entropy, correct predictions and images."""
        scores, labels = self._scores(model, batch), batch["labels"]
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

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        scores: Tensor = model(self._scaled(batch["images"]))
        return scores

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean.to(images.device)) / self._deviation.to(images.device)
