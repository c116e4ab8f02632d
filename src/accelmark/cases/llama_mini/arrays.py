"""A small Llama on the bytes of Shakespeare's plays in JAX, PaddlePaddle, MindSpore and TensorFlow."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from accelmark.tasks.language.arrays import STD, Decoder, NextToken
from accelmark.tasks.language.data import BYTE_VALUES, read_windows
from accelmark.train.batches import Arrays
from accelmark.train.case import decoder_flops, nn


class Layer(nn.Module):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    is_block = True

    def __init__(self, hidden: int, intermediate: int, heads: int, std: float) -> None:
        super().__init__()
        self.heads = heads
        small, smaller = nn.normal(STD), nn.normal(std)
        self.attention_norm, self.feed_norm = nn.RmsNorm(hidden), nn.RmsNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, small), nn.Linear(hidden, hidden, smaller)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, small)
        self.down = nn.Linear(intermediate, hidden, smaller)
        self.attention = nn.Attention(causal=True)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        qkv = nn.reshape(self.qkv(self.attention_norm(x)), (batch, length, 3, self.heads, hidden // self.heads))
        query, key, value = nn.unbind(qkv, 2)
        mixed = self.attention(nn.rotate(query, cos, sin), nn.rotate(key, cos, sin), value)
        x = x + self.out(nn.reshape(mixed, (batch, length, hidden)))
        gate, up = nn.split(self.gate_up(self.feed_norm(x)), 2)
        return x + self.down(nn.silu(gate) * up)


class Case(NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    tokens = "bytes"
    token_type = np.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    vocab_size = BYTE_VALUES

    def build_model(self) -> Any:
        hidden, intermediate, heads = map(self.number, ("hidden_size", "intermediate_size", "num_heads"))
        std = STD / math.sqrt(2 * self.number("num_layers"))
        sizes = {**self.sizes, "vocab_size": BYTE_VALUES}
        return Decoder(sizes, lambda: Layer(hidden, intermediate, heads, std))

    def dataset(self, *, train: bool) -> Arrays:
        count = None if train else self.number("eval_windows")
        return {"bytes": read_windows(self.data_dirs["shakespeare"], self.number("seq_length"), count)}

    def flops_per_sample(self) -> float:
        """Return 6 x matrix weights x tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
        feed = 3 * self.number("hidden_size") * self.number("intermediate_size")
        return decoder_flops({**self.sizes, "vocab_size": BYTE_VALUES}, feed)
