"""DLRM-DCNv2 on a made-up click log in PyTorch."""

from __future__ import annotations

from accelmark.cases.dlrm_dcnv2 import pytorch
from accelmark.cases.recommendation_mini._clicks import MadeUpClicks


class Case(pytorch.Case):
    """The network of ``dlrm_dcnv2`` at small size; the log is made up at the start, the same in every run."""

    def log(self, *, train: bool) -> MadeUpClicks:
        """Return the training samples or the held-out ones."""
        count = self.number("train_samples" if train else "eval_samples")
        tables = self.numbers("table_rows"), self.numbers("table_ids")
        return MadeUpClicks(count, self.number("num_dense"), *tables, seed=1 if train else 2)
