"""Pretraining of GPT-OSS 20B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import GptOssConfig

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """gpt-oss-20b (OpenAI 2025, arXiv:2508.10925, section 2)."""

    config_class = GptOssConfig
    config_values: ClassVar = {"max_position_embeddings": 131072, "sliding_window": 128}
    shards = "c4_llama3"
