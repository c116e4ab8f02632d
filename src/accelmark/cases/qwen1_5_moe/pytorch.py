"""Pretraining of Qwen1.5-MoE-A2.7B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen2MoeConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """Qwen1.5-MoE-A2.7B: fine-grained experts with a shared one (Qwen Team 2024, qwenlm.github.io/blog/qwen-moe)."""

    config_class = Qwen2MoeConfig
    names: ClassVar = {"num_experts": "num_experts"}
    config_values: ClassVar = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    shards = "qwen_tokens"
