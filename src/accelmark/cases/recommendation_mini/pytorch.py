"""DLRM-DCNv2 on a generated click log in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.tasks.recommendation.pytorch import ClickPrediction, area_under_curve
from accelmark.train.batches import Arrays

_WIDTH = 4
"""Of the hidden vectors of ids and dense features."""


class MadeUpClicks:
    """Samples that are drawn from a factorization machine (Rendle 2010, equation 1), the same in every run.

    Ids follow Zipf's law, dense features the normal distribution. Each id and each dense feature has a hidden vector
    and an effect; a table has the means of its ids. The log-odds of a click are the sum of all effects and of the
    products of all pairs of vectors. Hidden vectors and effects do not depend on ``seed``.
    """

    def __init__(self, count: int, num_dense: int, rows: Sequence[int], num_ids: Sequence[int], seed: int) -> None:
        world, random = np.random.default_rng(0), np.random.default_rng(seed)
        dense = random.standard_normal((count, num_dense), np.float32)
        hidden = world.normal(0, 0.4, (num_dense, _WIDTH)).astype(np.float32)
        odds = dense @ world.normal(0, 0.3, num_dense) - 1.5
        total, squares = dense @ hidden, dense**2 @ hidden**2
        columns = []
        for size, each in zip_strict(rows, num_ids):
            weights = 1 / np.arange(10, size + 10)
            ids = random.choice(size, (count, each), p=weights / weights.sum())
            vectors = world.normal(0, 0.4, (size, _WIDTH)).astype(np.float32)[ids].mean(1)
            odds += world.normal(0, 0.5, size)[ids].mean(1)
            total, squares = total + vectors, squares + vectors**2
            columns.append(ids)
        odds += ((total**2 - squares) / 2).sum(1)
        self.log_odds = odds
        """Of a click, for each sample."""
        label = random.random(count) < 1 / (1 + np.exp(-odds))
        ids = np.concatenate(columns, 1).astype(np.int32)
        self._arrays: Arrays = {"dense": dense, "ids": ids, "label": label.astype(np.float32)}

    def __len__(self) -> int:
        return len(self.log_odds)

    def read(self, start: int, stop: int) -> Arrays:
        """Return ``dense``, ``ids`` and ``label`` of the samples from ``start`` to before ``stop``."""
        return {name: array[start:stop] for name, array in self._arrays.items()}

    def best_auc(self) -> float:
        """Return the area under the ROC curve of the log-odds that the clicks were drawn with."""
        scored: npt.NDArray[Any] = np.stack([self.log_odds, self._arrays["label"]], 1)
        return area_under_curve(scored)


class Case(ClickPrediction):
    """The network of ``dlrm_dcnv2`` at small size; the log is generated at the start, the same in every run."""

    def log(self, *, train: bool) -> MadeUpClicks:
        count = self.number("train_samples" if train else "eval_samples")
        tables = self.numbers("table_rows"), self.numbers("table_ids")
        return MadeUpClicks(count, self.number("num_dense"), *tables, seed=1 if train else 2)

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return the area under the ROC curve, and the area for the probabilities that the clicks were drawn with."""
        return {**super().row_metrics(rows), "best_auc": self.log(train=False).best_auc()}
