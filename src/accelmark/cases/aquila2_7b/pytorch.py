"""Pretraining of Aquila2 7B in PyTorch."""

from __future__ import annotations

from transformers import LlamaConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Aquila2 7B (Zhang et al. 2024, arXiv:2408.07410)."""

    config_class = LlamaConfig
    shards = "aquila_tokens"
