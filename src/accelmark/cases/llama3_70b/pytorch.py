"""Pretraining of Llama 3 70B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Llama 3 70B (Grattafiori et al. 2024, arXiv:2407.21783, table 3)."""

    config_class = LlamaConfig
    config_values: ClassVar = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    shards = "llama3_tokens"
