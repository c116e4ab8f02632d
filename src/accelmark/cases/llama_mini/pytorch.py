"""A small Llama on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from accelmark.cases.llama_mini._model import LlamaMini
from accelmark.frameworks.pytorch.tasks.language_modelling import NextToken
from accelmark.spec.errors import DataError

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
    vocab_size = 256
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

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the training plays' windows, or ``eval_windows`` windows spread evenly over the held-out plays."""
        length = self.number("seq_length")
        windows = read_plays(self.data_dirs["shakespeare"], held_out=not train).unfold(0, length + 1, length)
        if not train:
            windows = windows[torch.linspace(0, len(windows) - 1, self.number("eval_windows")).long()]
        return {"bytes": windows}
