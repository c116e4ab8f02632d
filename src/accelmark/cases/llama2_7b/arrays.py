"""Pretraining of Llama 2 7B in JAX, MindSpore, PaddlePaddle and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accelmark.tasks.language.arrays import STD, Decoder, DecoderPretraining
from accelmark.train.case import Batch, nn


class LlamaLayer(nn.Module):
    """Causal attention with rotary embeddings and a gated feed-forward part, each with a residual connection."""

    is_block = True

    def __init__(self, sizes: Mapping[str, int], eps: float) -> None:
        super().__init__()
        hidden, intermediate, initial = sizes["hidden_size"], sizes["intermediate_size"], nn.normal(STD)
        self.width = hidden // sizes["num_heads"]
        self.attention_norm, self.feed_norm = nn.RmsNorm(hidden, eps), nn.RmsNorm(hidden, eps)
        self.query, self.out = nn.Linear(hidden, hidden, initial), nn.Linear(hidden, hidden, initial)
        self.key, self.value = (nn.Linear(hidden, sizes["num_kv_heads"] * self.width, initial) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, intermediate, initial), nn.Linear(hidden, intermediate, initial)
        self.down = nn.Linear(intermediate, hidden, initial)
        self.attention = nn.Attention(causal=True)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        normed, shape = self.attention_norm(x), (*x.shape[:2], -1, self.width)
        query, key, value = (nn.reshape(project(normed), shape) for project in (self.query, self.key, self.value))
        query, key = nn.rotate(query, cos, sin), nn.rotate(key, cos, sin)
        key, value = (nn.repeat(part, query.shape[2] // part.shape[2], 2) for part in (key, value))
        x = x + self.out(nn.reshape(self.attention(query, key, value), tuple(x.shape)))
        normed = self.feed_norm(x)
        return x + self.down(nn.silu(self.gate(normed)) * self.up(normed))


class Case(DecoderPretraining):
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

    def build_model(self) -> Any:
        eps = self.real("rms_norm_eps")
        return Decoder(self.sizes, lambda: LlamaLayer(self.sizes, eps), eps)

    def loss(self, model: Any, batch: Batch) -> Any:
        return model(*nn.neighbours(batch[self.tokens]))
