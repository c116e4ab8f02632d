"""A network of the search as a case of the training driver: its module, its data, its loss, its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelmark.automl.counting import count
from accelmark.automl.data import Dataset, Pictures
from accelmark.automl.graph.module import Array, GraphModule, load_weights
from accelmark.automl.morphs import WeightMode
from accelmark.automl.trial.inheritance import inherited
from accelmark.automl.trial.order import Listener, TrialOrder
from accelmark.frameworks.pytorch.batches import Shares
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase
from accelmark.spec.settings import TrainSettings


@final
class PictureBatches:
    """A rank's share of a set of pictures as the driver takes it; training pictures are augmented."""

    def __init__(self, pictures: Pictures, batch_size: int, place: Place, *, train: bool) -> None:
        self._pictures, self._place, self._train = pictures, place, train
        self._shares = Shares(len(pictures), batch_size, place, train=train)

    @property
    def num_samples(self) -> int:
        """Pictures of one epoch over all ranks; what does not fill a global batch is left out of training."""
        return self._shares.num_samples

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield raw pictures (uint8) and labels; seed and epoch decide the order, the rank its augmentation too."""
        place = self._place
        generator = np.random.default_rng([place.shared_seed, number, place.rank]) if self._train else None
        for share in self._shares.epoch(number):
            indices = share.numpy()
            images = np.ascontiguousarray(self._pictures.batch(indices, generator))
            yield {"images": torch.from_numpy(images), "labels": torch.from_numpy(self._pictures.labels[indices])}


@final
class TrialCase(TrainCase):
    """One trial's network. Pictures are scaled where the model is, so that they travel as bytes.

    ``weights`` are those of the order's parent network, or None to start from scratch.
    """

    def __init__(
        self,
        settings: TrainSettings,
        data_dirs: Mapping[str, Path],
        place: Place,
        *,
        order: TrialOrder,
        dataset: Dataset,
        weights: Mapping[str, Array] | None,
        listener: Listener,
    ) -> None:
        super().__init__(settings, data_dirs, place)
        self._order: Final = order
        self._data: Final = dataset
        self._weights: Final = weights
        self._listener: Final = listener
        self.started_from: WeightMode = "from-scratch"
        self.module: GraphModule | None = None
        shape = (1, -1, 1, 1)
        self._mean: Final = torch.tensor(dataset.mean, device=place.device).view(shape)
        self._deviation: Final = torch.tensor(dataset.deviation, device=place.device).view(shape)

    @property
    def graph(self) -> GraphModule:
        """The network that is trained, without any wrapper."""
        if self.module is None:
            raise ValueError("the case was not asked for its model yet")
        return self.module

    def build_model(self) -> nn.Module:
        """Build the network, with its parent's weights carried over where there are some."""
        self.module = GraphModule(self._order.network)
        if self._weights is not None and self._order.parent_network is not None:
            load_weights(self.module, inherited(self._order, self._order.parent_network, self._weights, self._data))
            self.started_from = "carried"
        return self.module

    def train_batches(self) -> PictureBatches:
        """Return this rank's share of the training pictures."""
        return PictureBatches(self._data.training, self.settings.batch_size, self.place, train=True)

    def eval_batches(self) -> PictureBatches:
        """Return this rank's share of the validation pictures."""
        return self._evaluated(self._data.validation)

    def held_out_batches(self) -> PictureBatches:
        """Return this rank's share of the pictures that the search never sees."""
        return self._evaluated(self._data.held_out)

    def _evaluated(self, pictures: Pictures) -> PictureBatches:
        return PictureBatches(pictures, self.settings.eval_batch_size, self.place, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return black pictures, with which the driver counts the network's operations."""
        images = torch.zeros(size, *self._order.network.input_shape, dtype=torch.uint8)
        return {"images": images, "labels": torch.zeros(size, dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the smoothed cross-entropy; the listener hears of the pictures of all ranks."""
        scores = self._scores(model, batch)
        smoothing = self._order.training.label_smoothing
        loss = cross_entropy(scores.float(), batch["labels"], label_smoothing=smoothing)
        if not loss.is_meta:
            self._listener.progress(len(scores) * self.place.world_size)
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the summed cross-entropy, the right answers and the pictures."""
        scores, labels = self._scores(model, batch), batch["labels"]
        self._listener.progress(len(scores) * self.place.world_size)
        return {
            "loss": cross_entropy(scores.float(), labels, reduction="sum"),
            "correct": (scores.argmax(dim=1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy, mean loss and the number of pictures they are of."""
        number = sums["count"]
        return {"accuracy": sums["correct"] / number, "loss": sums["loss"] / number, "count": number}

    def flops_per_sample(self) -> float:
        """Return the matrix work that the score counts for one picture, forward and backward."""
        return float(count(self._order.network, "accelmark").matrix)

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        images = batch["images"]
        device = images.device
        scaled = (images.float() / 255 - self._mean.to(device)) / self._deviation.to(device)
        scores: Tensor = model(scaled)
        return scores
