"""A small mixture of experts on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from transformers import MixtralConfig

from accelmark.cases.llama_mini._plays import read_windows
from accelmark.tasks.language.pytorch_decoder import Pretraining


class Case(Pretraining):
    """Mixtral's architecture (Jiang et al. 2024, arXiv:2401.04088) in small, on the windows of ``llama_mini``."""

    config_class = MixtralConfig
    config_values: ClassVar = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
    }
    tokens = "bytes"
    dtype = torch.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the training plays' windows, or ``eval_samples`` windows spread evenly over the held-out plays."""
        count = None if train else self.number("eval_samples")
        windows = read_windows(self.data_dirs["shakespeare"], self.number("seq_length"), count)
        return {"bytes": torch.from_numpy(windows)}
