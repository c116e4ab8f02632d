"""Pretraining of Llama 3.1 8B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Llama 3.1 8B (Grattafiori et al. 2024, arXiv:2407.21783, table 3)."""

    config_class = LlamaConfig
    config_values: ClassVar = {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    shards = "c4_llama3"
