"""A small Llama on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from accelmark.cases.llama_mini._model import LlamaMini
from accelmark.cases.llama_mini._plays import VOCAB, held_out_windows, training_windows
from accelmark.frameworks.pytorch.case import PipelineParts
from accelmark.tasks.language.pytorch import NextToken


class Case(NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    tokens = "bytes"
    dtype = torch.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    vocab_size = VOCAB
    block_class = "Layer"

    def build_model(self) -> nn.Module:
        """Build the decoder with random weights."""
        return LlamaMini(
            vocab=self.vocab_size,
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            length=self.number("seq_length"),
        )

    def pipeline_parts(self) -> PipelineParts:
        """Return the modules of the decoder."""
        return PipelineParts("embedding", "layers", ("norm", "head"))

    def splits_sequences(self) -> bool:
        """Return that the decoder and both losses take parts of sequences."""
        return True

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the training plays' windows, or ``eval_windows`` windows spread evenly over the held-out plays."""
        plays, length = self.data_dirs["shakespeare"], self.number("seq_length")
        if train:
            return {"bytes": torch.from_numpy(training_windows(plays, length))}
        return {"bytes": torch.from_numpy(held_out_windows(plays, length, self.number("eval_windows")))}
