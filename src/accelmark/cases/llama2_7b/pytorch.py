"""Pretraining of Llama 2 7B in PyTorch."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.data.batches import IndexedBatches
from accelmark.frameworks.pytorch.model.chunked_loss import chunked_cross_entropy
from accelmark.frameworks.pytorch.model.initialize import initialize_normal
from accelmark.frameworks.pytorch.tasks.language_modelling import NextToken
from accelmark.frameworks.pytorch.tasks.token_shards import TokenShards
from accelmark.train.formulas import attention_flops, dense_flops

_CAUSAL: Final = "accelmark_causal"
_INIT_STD: Final = 0.02


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention by SDPA without a mask tensor, so that a flash kernel can be chosen.

    transformers' own ``sdpa`` tests the position ids with ``.all()``, which synchronizes on an accelerator and fails on
    the meta device, and passes a dense mask under ``torch.compile``. It builds no mask for a custom attention function.

    Args:
        module: the attention layer; unused.
        query: shape (batch, heads, length, width).
        key: shape (batch, key-value heads, length, width).
        value: of the shape of ``key``.
        attention_mask: has to be None.
        scaling: factor of the scores.
    """
    if attention_mask is not None:
        raise ValueError("causal_attention takes no attention mask: samples are not padded")
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2), None


AttentionInterface.register(_CAUSAL, causal_attention)


class CausalLm(nn.Module):
    """Llama of transformers with random weights; returns logits, or the loss if labels are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, length, vocabulary), or the mean cross entropy of ``labels``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden: Tensor = self.net.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        if labels is not None:
            return chunked_cross_entropy(hidden.flatten(0, 1), self.net.lm_head.weight, labels.flatten())
        logits: Tensor = self.net.lm_head(hidden)
        return logits


class Case(NextToken):
    """Next-token prediction on samples of ``seq_length + 1`` tokens, the last of which is only a label."""

    block_class = "LlamaDecoderLayer"

    def build_model(self) -> nn.Module:
        """Build Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288); open runs may reduce its size by ``model``.

        Weights are normal with a standard deviation of 0.02 and norms are one, as in transformers. Several threads
        draw them, since one takes minutes.
        """
        config = LlamaConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            intermediate_size=self.number("intermediate_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            num_key_value_heads=self.number("num_kv_heads"),
            max_position_embeddings=self.number("seq_length"),
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation=_CAUSAL,  # type: ignore[call-arg]  # an argument of every configuration
        )
        with torch.device("meta"):
            model = CausalLm(config)
        if torch.get_default_device().type != "meta":
            initialize_normal(model, _INIT_STD, self.place.shared_seed)
            model.net.model.rotary_emb = LlamaRotaryEmbedding(config)
        return model

    def _batches(self, split: str, size: int, *, train: bool) -> Batches:
        length = self.number("seq_length")
        shards = TokenShards(self.data_dirs["llama_tokens"], split, length + 1, length, self.number("vocab_size"))
        return IndexedBatches(shards, size, self.place, self.settings.loader, train=train)

    def train_batches(self) -> Batches:
        """Return windows of ``train`` in a new order each epoch."""
        return self._batches("train", self.settings.batch_size, train=True)

    def eval_batches(self) -> Batches:
        """Return windows of ``val``."""
        return self._batches("val", self.settings.eval_batch_size, train=False)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy per token, in nats; training computes it in chunks of the logits.

        fp16 does not use chunks, whose gradients would lack the loss scale.
        """
        if model.training and self.settings.precision != "fp16":
            loss: Tensor = model(batch["tokens"][:, :-1], batch["tokens"][:, 1:])
            return loss
        return super().loss(model, batch)

    def flops_per_sample(self) -> float:
        """Count layers, output layer and attention (PaLM, arXiv:2204.02311, appendix B)."""
        hidden, length, layers = self.number("hidden_size"), self.number("seq_length"), self.number("num_layers")
        kv_width = hidden * self.number("num_kv_heads") // self.number("num_heads")
        layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * self.number("intermediate_size")
        weights = layers * layer + hidden * self.number("vocab_size")
        return dense_flops(weights, length) + attention_flops(layers, hidden, length)
