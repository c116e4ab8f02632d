"""Pretraining of Llama 2 7B in Paddle."""

from __future__ import annotations

from paddle import nn

from accelmark.tasks.language.paddle import Llama, Pretraining


class Case(Pretraining):
    """Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288)."""

    shards = "llama_tokens"
    block_class = "LlamaLayer"

    def build_model(self) -> nn.Layer:
        """Build the decoder with random weights."""
        return Llama(self.sizes, self.real("rms_norm_eps"))
