"""Pretraining of Llama 2 7B in JAX."""

from __future__ import annotations

from typing import ClassVar

from accelmark.tasks.language.jax import Pretraining


class Case(Pretraining):
    """Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288)."""

    shards = "llama_tokens"
    reference_names: ClassVar = {
        r"^embedding\.": "net.model.embed_tokens.",
        r"^layers\.": "net.model.layers.",
        r"^norm\.": "net.model.norm.",
        r"^head\.": "net.lm_head.",
        r"\.attention_norm\.": ".input_layernorm.",
        r"\.feed_norm\.": ".post_attention_layernorm.",
        r"\.(query|key|value|out)\.": r".self_attn.\1_proj.",
        r"\.query_": ".q_",
        r"\.key_": ".k_",
        r"\.value_": ".v_",
        r"\.out_": ".o_",
        r"\.(gate|up|down)\.": r".mlp.\1_proj.",
    }
