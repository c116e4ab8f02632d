"""Pretraining of GPT-3 6.7B in Paddle."""

from __future__ import annotations

from paddle import nn

from accelmark.tasks.language.paddle import Gpt, Pretraining


class Case(Pretraining):
    """GPT-3 6.7B (Brown et al. 2020, arXiv:2005.14165, table 2.1), with dense attention in every layer."""

    shards = "gpt_tokens"
    feed_matrices = 2
    block_class = "GptLayer"

    def build_model(self) -> nn.Layer:
        """Build the decoder with random weights."""
        return Gpt(self.sizes, self.real("norm_eps"))
