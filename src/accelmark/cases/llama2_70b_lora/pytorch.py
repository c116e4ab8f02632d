"""Low-rank adaptation of Llama 2 70B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

from accelmark.tasks.language.pytorch import LowRankTuning


class Case(LowRankTuning):
    """Llama 2 70B (Touvron et al. 2023, arXiv:2307.09288) with changes of all layers of attention."""

    config_class = LlamaConfig
    config_values: ClassVar = {"max_position_embeddings": 4096}
    adapted = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
    shards = "gov_report"
    weights = "llama2_70b_weights"
