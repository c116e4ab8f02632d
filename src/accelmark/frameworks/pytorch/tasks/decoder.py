"""Next-token prediction with a causal decoder of transformers."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.chunked_loss import chunked_cross_entropy
from accelmark.frameworks.pytorch.model.initialize import initialize_normal
from accelmark.frameworks.pytorch.tasks.language_modelling import NextToken

CAUSAL: Final = "accelmark_causal"
"""Name of :func:`causal_attention` in a configuration's ``attn_implementation``."""
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
    Queries have the shape (batch, heads, length, width), keys and values (batch, key-value heads, length, width).
    """
    if attention_mask is not None:
        raise ValueError("causal_attention takes no attention mask: samples are not padded")
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2), None


AttentionInterface.register(CAUSAL, causal_attention)


class CausalLm(nn.Module):
    """Llama of transformers with random weights; returns logits, or the loss if labels are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(config)

    @classmethod
    def initialized(cls, config: LlamaConfig, seed: int) -> CausalLm:
        """Return the model with normal weights of standard deviation 0.02 and norms of one, as in transformers.

        Several threads draw the weights, since one takes minutes for billions of them.
        """
        with torch.device("meta"):
            model = cls(config)
        if torch.get_default_device().type != "meta":
            initialize_normal(model, _INIT_STD, seed)
            model.net.model.rotary_emb = LlamaRotaryEmbedding(config)
        return model

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits of shape (batch, length, vocabulary), or the mean cross entropy of ``labels``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden: Tensor = self.net.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        if labels is not None:
            return chunked_cross_entropy(hidden.flatten(0, 1), self.net.lm_head.weight, labels.flatten())
        logits: Tensor = self.net.lm_head(hidden)
        return logits


class ChunkedNextToken(NextToken):
    """Next-token prediction with a :class:`CausalLm`, whose loss in training is computed in chunks of the logits."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats; fp16 uses whole logits, as chunks lack the loss scale."""
        if model.training and self.settings.precision != "fp16":
            loss: Tensor = model(batch["tokens"][:, :-1], batch["tokens"][:, 1:])
            return loss
        return super().loss(model, batch)
