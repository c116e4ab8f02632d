"""Pretraining of GPT-3 6.7B in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from transformers import GPT2Config

from accelmark.tasks.language.pytorch import Pretraining


class Case(Pretraining):
    """GPT-3 6.7B (Brown et al. 2020, arXiv:2005.14165, table 2.1), with dense attention in every layer."""

    config_class = GPT2Config
    names: ClassVar = {"intermediate_size": "n_inner", "norm_eps": "layer_norm_epsilon"}
    config_values: ClassVar = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shards = "gpt_tokens"
