"""Prediction of clicks from dense features and ids of embedding tables."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase
from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.spec.backports import pairwise, zip_strict
from accelmark.spec.errors import UNREADABLE, DataError, RequestError, raising
from accelmark.spec.settings.training import LoaderSettings
from accelmark.train.batches import Arrays, DataSetCase, Share, read_ahead

_LABELS: Final = "_labels.npy"
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""Lengths of name and extra field in the header that a ZIP archive has before each member."""


class ClickLog:
    """The samples of all days in a directory, in the order of the days' numbers, memory-mapped.

    A day has ``<day>_labels.npy`` of shape (samples, 1), ``<day>_dense.npy`` of shape (samples, dense features), and
    ``<day>_sparse_multi_hot.npz``, not compressed, with the ids of each table: ``0.npy`` of shape (samples, ids).
    Tables have ``rows`` each, and ``num_ids`` in a sample; ``share`` is the first part of the last day that is used.
    """

    def __init__(
        self, directory: Path, num_dense: int, rows: Sequence[int], num_ids: Sequence[int], share: float = 1.0
    ) -> None:
        paths = sorted(directory.glob(f"*{_LABELS}"))
        labels = sorted(paths, key=lambda path: int("".join(filter(str.isdigit, path.name)) or 0))
        if not labels:
            raise DataError(f"{directory}: expected <day>{_LABELS} here, found none")
        self._paths = [path.with_name(path.name.removesuffix(_LABELS) + "_sparse_multi_hot.npz") for path in labels]
        self._days = [_opened(path, num_dense, num_ids) for path in labels]
        sizes = [len(day[0]) for day in self._days]
        sizes[-1] = math.ceil(sizes[-1] * share)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._limits = np.repeat(rows, num_ids)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Arrays:
        """Return ``dense``, ``ids`` and ``label`` of the samples from ``start`` to before ``stop``."""
        parts = []
        for number, (first, end) in enumerate(zip_strict(self._starts[:-1], self._starts[1:])):
            chosen = slice(max(start, first) - first, min(stop, end) - first)
            if max(start, first) < min(stop, end):
                label, dense, *tables = self._days[number]
                ids = np.concatenate([table[chosen] for table in tables], 1)
                outside = (ids < 0) | (ids >= self._limits)
                if outside.any():
                    row, column = np.argwhere(outside)[0].tolist()
                    problem = f"id {ids[row, column]} in column {column} of all tables' ids is outside of its table"
                    raise DataError(f"{self._paths[number]}: sample {chosen.start + row}: {problem}")
                parts.append((np.array(dense[chosen], np.float32), ids, label[chosen, 0].astype(np.float32)))
        joined = [np.concatenate(each) for each in zip_strict(*parts)]
        return dict(zip_strict(("dense", "ids", "label"), joined))


def _opened(labels: Path, num_dense: int, num_ids: Sequence[int]) -> list[Any]:
    """Return labels, dense features and the ids of each table of a day, memory-mapped."""
    stem = labels.name.removesuffix(_LABELS)
    archive = labels.with_name(f"{stem}_sparse_multi_hot.npz")
    files: list[tuple[Path, str | None, int]] = [
        (labels, None, 1),
        (labels.with_name(f"{stem}_dense.npy"), None, num_dense),
    ]
    files += [(archive, f"{number}.npy", width) for number, width in enumerate(num_ids)]
    arrays = [_mapped(path, member) for path, member, _ in files]
    for (path, member, width), array in zip_strict(files, arrays):
        if array.shape != (len(arrays[0]), width):
            expected = f"expected {(len(arrays[0]), width)}, as many samples as in {labels.name}"
            raise DataError(f"{path}: {member or 'it'} has shape {array.shape}; {expected}")
    return arrays


def _mapped(path: Path, member: str | None) -> npt.NDArray[Any]:
    """Return the array of a file, or of a member of an archive that is not compressed."""
    with raising(DataError, f"{path}: {member or 'it'} cannot be read", *UNREADABLE, zipfile.BadZipFile):
        if member is None:
            plain: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return plain
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            info = archive.getinfo(member)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed; write it with numpy.savez")
            file.seek(info.header_offset)
            name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            file.seek(info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra))
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def area_under_curve(scored: npt.NDArray[np.float64]) -> float:
    """Return the area under the ROC curve: the chance that a positive sample has a higher score than a negative one.

    ``scored`` has a row of score and label (0 or 1) for each sample; of equal scores, half counts.
    """
    positive = scored[:, 1] > 0
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise DataError(
            f"the evaluation data has {num_positive} clicks in {len(scored)} samples; AUC needs both labels"
        )
    ordered, scores = np.sort(scored[:, 0]), np.sort(scored[positive, 0])
    below, up_to = (np.searchsorted(ordered, scores, side) for side in ("left", "right"))
    ranks = (below.sum() + up_to.sum() + num_positive) / 2 - num_positive * (num_positive + 1) / 2
    return float(ranks / (num_positive * num_negative))


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
        crossed: Tensor = first * self.up(self.down(state)) + state
        return crossed


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
        logits: Tensor = self.over(state).squeeze(1)
        return logits


class Clicks(Protocol):
    """Samples that are read in consecutive parts."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Arrays:
        """Return ``dense``, ``ids`` and ``label`` of the samples from ``start`` to before ``stop``."""


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


class ClickPrediction(DataSetCase, TrainCase):
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

    def dataset(self, *, train: bool) -> Clicks:
        return self.log(train=train)

    def _batches(self, data: Clicks, size: int, *, train: bool) -> ClickBatches:
        return ClickBatches(data, size, self.place, self.settings.loader, train=train)

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
        return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["ids"]).float(), batch["label"])

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the cross entropies; ``scored`` has score and label of each sample."""
        logits, label = model(batch["dense"], batch["ids"]).float(), batch["label"]
        loss = F.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return {"loss": loss, "count": torch.ones_like(label).sum(), "scored": torch.stack([logits, label], 1)}

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return the area under the ROC curve."""
        return {"auc": area_under_curve(rows["scored"])}
