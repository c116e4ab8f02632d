"""A small Llama on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from accelmark.cases.llama_mini._model import LlamaMini
from accelmark.frameworks.pytorch.case import Batches
from accelmark.frameworks.pytorch.data.batches import TensorBatches
from accelmark.frameworks.pytorch.tasks.language_modelling import NextToken
from accelmark.spec.errors import DataError
from accelmark.train.formulas import attention_flops, dense_flops

_VOCAB: Final = 256
HELD_OUT: Final = ("macbeth", "richard-ii", "twelfth-night")
"""Plays held out from training: a tragedy, a history, a comedy."""


def read_plays(directory: Path, *, held_out: bool) -> Tensor:
    """Return the concatenated bytes (uint8) of the plays in ``HELD_OUT`` or of all others.

    Raises:
        DataError: there are no plays, or a held-out one is missing.
    """
    plays = {path.stem: path for path in directory.rglob("*.md")}
    missing = [name for name in HELD_OUT if name not in plays]
    if missing:
        raise DataError(f"{directory}: expected the plays as *.md here; {', '.join(missing)} not found")
    chosen = [plays[name] for name in sorted(plays) if (name in HELD_OUT) == held_out]
    return torch.from_numpy(np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8).copy())


class Case(NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    tokens = "bytes"
    dtype = torch.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    vocab_size = _VOCAB
    block_class = "Layer"

    def build_model(self) -> nn.Module:
        """Build the decoder with random weights."""
        return LlamaMini(
            vocab=_VOCAB,
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            length=self.number("seq_length"),
        )

    def _windows(self, *, held_out: bool) -> Tensor:
        length = self.number("seq_length")
        return read_plays(self.data_dirs["shakespeare"], held_out=held_out).unfold(0, length + 1, length)

    def train_batches(self) -> Batches:
        """Return the training plays' windows in a new order each epoch."""
        windows = self._windows(held_out=False)
        return TensorBatches({"bytes": windows}, self.settings.batch_size, self.place, train=True)

    def eval_batches(self) -> Batches:
        """Return ``eval_windows`` windows, spread evenly over the held-out plays."""
        windows = self._windows(held_out=True)
        chosen = windows[torch.linspace(0, len(windows) - 1, self.number("eval_windows")).long()]
        return TensorBatches({"bytes": chosen}, self.settings.eval_batch_size, self.place, train=False)

    def flops_per_sample(self) -> float:
        """Count layers, output layer and attention (PaLM, arXiv:2204.02311, appendix B)."""
        hidden, length, layers = self.number("hidden_size"), self.number("seq_length"), self.number("num_layers")
        weights = layers * (4 * hidden * hidden + 3 * hidden * self.number("intermediate_size")) + hidden * _VOCAB
        return dense_flops(weights, length) + attention_flops(layers, hidden, length)
