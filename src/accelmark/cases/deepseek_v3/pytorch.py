"""Continued pretraining of DeepSeek-V3 in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import DeepseekV3Config

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 4.2) without multi-token prediction."""

    config_class = DeepseekV3Config
    config_values: ClassVar = {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }
    shards = "c4_llama3"
    weights = "deepseek_v3_weights"
