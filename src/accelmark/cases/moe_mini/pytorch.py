"""A small mixture of experts on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from transformers import MixtralConfig

from accelmark.cases.llama_mini.pytorch import Case as LlamaMini
from accelmark.frameworks.pytorch.tasks.decoder import Pretraining


class Case(Pretraining):
    """The architecture of Mixtral (Jiang et al. 2024, arXiv:2401.04088) over bytes, on llama_mini's data."""

    config_class = MixtralConfig
    config_values: ClassVar = {"vocab_size": 256, "sliding_window": None, "bos_token_id": None, "eos_token_id": None}
    tokens = LlamaMini.tokens
    dtype = LlamaMini.dtype
    reported = LlamaMini.reported
    vocab_size = LlamaMini.vocab_size

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the windows of llama_mini."""
        return LlamaMini(self.settings, self.data_dirs, self.place).dataset(train=train)
