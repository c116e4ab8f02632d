"""GPT-2 medium in PyTorch, trained on token shards and evaluated on LAMBADA."""

from __future__ import annotations

from typing import ClassVar

from transformers import GPT2Config

from accelmark.tasks.language.pytorch import LastWord


class Case(LastWord):
    """GPT-2 medium (Radford et al. 2019, table 2), from random weights, with dropout except of attention."""

    config_class = GPT2Config
    names: ClassVar = {"intermediate_size": "n_inner"}
    config_values: ClassVar = {"attn_pdrop": 0.0}
    shards = "lambada"
