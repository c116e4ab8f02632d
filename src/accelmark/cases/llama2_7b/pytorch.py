"""Pretraining of Llama 2 7B in PyTorch."""

from __future__ import annotations

from transformers import LlamaConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288)."""

    config_class = LlamaConfig
    shards = "llama_tokens"
