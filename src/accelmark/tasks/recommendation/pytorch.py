"""Prediction of clicks from dense features and ids of embedding tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase
from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.spec.backports import pairwise, zip_strict
from accelmark.spec.errors import RequestError
from accelmark.spec.settings.training import LoaderSettings
from accelmark.tasks.recommendation.data import ClickLog, area_under_curve
from accelmark.train.batches import Arrays, Share, read_ahead


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers, each followed by a ReLU."""
    return nn.Sequential(*(part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())))


class CrossLayer(nn.Module):
    """A low-rank cross layer of DCN v2 (Wang et al. 2020, arXiv:2008.13535, equation 2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
        for linear in (self.down, self.up):
            nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, first: Tensor, state: Tensor) -> Tensor:
        """Return ``first`` x the layer's output + ``state``, of the shape of both."""
        return first * self.up(self.down(state)) + state


class DeepCrossNetwork(nn.Module):
    """Dense layers, embedding tables, cross layers over both, and layers up to a logit, as in MLPerf's DLRM-DCNv2."""

    def __init__(
        self, tables: EmbeddingTables, dense: Sequence[int], cross: Sequence[int], over: Sequence[int]
    ) -> None:
        super().__init__()
        width = dense[-1] * (1 + len(tables.rows))
        self.tables, self.dense = tables, layers(dense)
        self.cross = nn.ModuleList(CrossLayer(width, rank) for rank in cross)
        self.over = nn.Sequential(layers([width, *over]), nn.Linear(over[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return a logit for each sample."""
        first = state = torch.cat([self.dense(dense)[:, None], self.tables(ids)], 1).flatten(1)
        for layer in self.cross:
            state = layer(first, state)
        return self.over(state).squeeze(1)


class Clicks(Protocol):
    """Samples that are read in consecutive parts."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Arrays:
        """Return ``dense``, ``ids`` and ``label`` of the samples from ``start`` to before ``stop``."""


@final
class ClickBatches:
    """Batches of consecutive samples, in the order of the log; ``loader.num_workers`` threads read them ahead."""

    def __init__(self, log: Clicks, batch_size: int, place: Place, loader: LoaderSettings, *, train: bool) -> None:
        self._log, self._loader = log, loader
        self._share = Share(len(log), batch_size, place, train)
        self.num_samples = self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Iterate over this rank's batches from batch ``skip`` on, the same in every epoch."""
        share = self._share
        if share.train:
            slices = share.train_slices(skip)
        else:
            rank, world_size = share.place.rank, share.place.world_size
            begin, end = (share.total * part // world_size for part in (rank, rank + 1))
            cuts = [begin + (end - begin) * batch // share.num_batches for batch in range(share.num_batches + 1)]
            slices = (slice(*pair) for pair in list(pairwise(cuts))[skip:])
        for arrays in read_ahead(lambda chosen: self._log.read(chosen.start, chosen.stop), slices, self._loader):
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}


class ClickPrediction(TrainCase):
    """Whether a user clicks, by a network that returns logits for ``dense`` and ``ids``.

    Under ``model`` are, as texts with commas, ``table_rows`` and ``table_ids``: the number of rows of each embedding
    table, and of its ids in a sample; ``dense_widths`` of the layers for dense features, ``over_widths`` up to a logit.
    """

    ratios: ClassVar = {"eval_loss": ("loss", "count")}
    samples: ClassVar[str]
    """Name of the data set in MLPerf's layout, where a case does not override ``log``."""

    def build_model(self) -> nn.Module:
        """Build the network with random weights; raises RequestError for settings that tables do not support."""
        if self.settings.precision == "fp16":
            raise RequestError("precision: the gradients of embedding tables are not scaled; use bf16 instead of fp16")
        if self.settings.gradient_clip_norm is not None:
            raise RequestError("gradient_clip_norm: gradients of embedding tables are not clipped; leave it null")
        if self.settings.optimizer.name != "adagrad":
            raise RequestError("optimizer.name: embedding tables are trained by adagrad")
        dense, over = self.numbers("dense_widths"), self.numbers("over_widths")
        tables = EmbeddingTables(self.numbers("table_rows"), self.numbers("table_ids"), dense[-1])
        ranks = [self.number("cross_rank")] * self.number("cross_layers")
        return DeepCrossNetwork(tables, [self.number("num_dense"), *dense], ranks, over)

    def log(self, *, train: bool) -> Clicks:
        """Return the days in ``train``, or the first half of the last day in ``val``."""
        rows, ids = self.numbers("table_rows"), self.numbers("table_ids")
        split, share = ("train", 1.0) if train else ("val", 0.5)
        return ClickLog(self.data_dirs[self.samples] / split, self.number("num_dense"), rows, ids, share)

    def train_batches(self) -> ClickBatches:
        """Return all training samples in their order."""
        settings = self.settings
        return ClickBatches(self.log(train=True), settings.batch_size, self.place, settings.loader, train=True)

    def eval_batches(self) -> ClickBatches:
        """Return the evaluation's samples."""
        settings = self.settings
        return ClickBatches(self.log(train=False), settings.eval_batch_size, self.place, settings.loader, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random features and ids; every other sample is a click."""
        random = generator_for(self.place.seed)
        pairs = zip_strict(self.numbers("table_rows"), self.numbers("table_ids"))
        return {
            "dense": torch.rand(size, self.number("num_dense"), generator=random) * 5,
            "ids": torch.cat([torch.randint(rows, (size, ids), generator=random) for rows, ids in pairs], 1).int(),
            "label": (torch.arange(size) % 2).float(),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean binary cross entropy."""
        return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["ids"]).float(), batch["label"])

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the cross entropies; ``scored`` has score and label of each sample."""
        logits, label = model(batch["dense"], batch["ids"]).float(), batch["label"]
        loss = F.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return {"loss": loss, "count": torch.ones_like(label).sum(), "scored": torch.stack([logits, label], 1)}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return the area under the ROC curve."""
        return {"auc": area_under_curve(rows["scored"])}
