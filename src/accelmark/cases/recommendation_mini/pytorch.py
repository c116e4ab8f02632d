"""DLRM-DCNv2 on a generated click log in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from accelmark.cases.recommendation_mini._clicks import MadeUpClicks
from accelmark.tasks.recommendation.pytorch import ClickPrediction


class Case(ClickPrediction):
    """The network of ``dlrm_dcnv2`` at small size; the log is generated at the start, the same in every run."""

    def log(self, *, train: bool) -> MadeUpClicks:
        """Return the training samples or the held-out ones."""
        count = self.number("train_samples" if train else "eval_samples")
        tables = self.numbers("table_rows"), self.numbers("table_ids")
        return MadeUpClicks(count, self.number("num_dense"), *tables, seed=1 if train else 2)

    def row_metrics(self, rows: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, float]:
        """Return the area under the ROC curve, and the area for the probabilities that the clicks were drawn with."""
        return {**super().row_metrics(rows), "best_auc": self.log(train=False).best_auc()}
