"""The data of the small Llama for frameworks with NumPy batches."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from accelmark.cases.llama_mini._plays import VOCAB, held_out_windows, training_windows
from accelmark.tasks.language.arrays import TokenData
from accelmark.train.batches import Arrays


class Plays(TokenData):
    """Bytes in consecutive windows; the byte after each window is only a label."""

    tokens = "bytes"
    token_type = np.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    vocab_size = VOCAB

    def dataset(self, *, train: bool) -> Arrays:
        """Return the training plays' windows, or ``eval_windows`` windows spread evenly over the held-out plays."""
        plays, length = self.data_dirs["shakespeare"], self.number("seq_length")
        if train:
            return {"bytes": training_windows(plays, length)}
        return {"bytes": held_out_windows(plays, length, self.number("eval_windows"))}
