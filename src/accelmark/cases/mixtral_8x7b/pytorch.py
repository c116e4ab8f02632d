"""Pretraining of Mixtral 8x7B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import MixtralConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Mixtral 8x7B (Jiang et al. 2024, arXiv:2401.04088, table 1)."""

    config_class = MixtralConfig
    config_values: ClassVar = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_window": None,
    }
    shards = "mistral_tokens"
