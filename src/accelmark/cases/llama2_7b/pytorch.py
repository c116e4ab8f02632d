"""Pretraining of Llama 2 7B in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from accelmark.frameworks.pytorch.batches import IndexedBatches, generator_for
from accelmark.frameworks.pytorch.case import Batch, Batches, TrainCase
from accelmark.frameworks.pytorch.token_shards import TokenShards
from accelmark.train.formulas import attention_flops, dense_flops


class CausalLm(nn.Module):
    """transformers' Llama with random weights; takes tokens, gives logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        logits: Tensor = self.net(input_ids=tokens, use_cache=False).logits
        return logits


@final
class NextTokens:
    """Windows of ``length`` tokens and the token after each, one window beginning where the last ended."""

    def __init__(self, shards: TokenShards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``tokens`` of shape (length + 1,); nothing is random about them."""
        return {"tokens": self._shards.window(index)}


class Case(TrainCase):
    """Next-token prediction; the last of a sample's ``seq_length + 1`` tokens is only predicted."""

    def build_model(self) -> nn.Module:
        """Build Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288); smaller by ``model`` in open runs."""
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
        )
        return CausalLm(config)

    def _batches(self, split: str, size: int, *, train: bool) -> Batches:
        length = self.number("seq_length")
        shards = TokenShards(self.data_dirs["llama_tokens"], split, length + 1, length, self.number("vocab_size"))
        return IndexedBatches(NextTokens(shards), size, self.place, self.settings.loader, train=train)

    def train_batches(self) -> Batches:
        """Windows of ``train`` in a new order each epoch."""
        return self._batches("train", self.settings.batch_size, train=True)

    def eval_batches(self) -> Batches:
        """Windows of ``val``."""
        return self._batches("val", self.settings.eval_batch_size, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Random tokens."""
        shape = (size, self.number("seq_length") + 1)
        return {"tokens": torch.randint(0, self.number("vocab_size"), shape, generator=generator_for(self.place.seed))}

    def _token_losses(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        logits: Tensor = model(batch["tokens"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"][:, 1:].flatten(), reduction=reduction)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of a token, in nats."""
        return self._token_losses(model, batch, "mean")

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the tokens' cross entropies."""
        count = torch.ones_like(batch["tokens"][:, 1:]).sum()
        return {"loss": self._token_losses(model, batch, "sum"), "count": count}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean cross entropy of a held-out token and its exponential."""
        loss = sums["loss"] / sums["count"]
        return {"eval_loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    def flops_per_sample(self) -> float:
        """Count layers, output layer and attention (PaLM, arXiv:2204.02311, appendix B)."""
        hidden, length, layers = self.number("hidden_size"), self.number("seq_length"), self.number("num_layers")
        kv_width = hidden * self.number("num_kv_heads") // self.number("num_heads")
        layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * self.number("intermediate_size")
        weights = layers * layer + hidden * self.number("vocab_size")
        return dense_flops(weights, length) + attention_flops(layers, hidden, length)

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the decoder layers."""
        return [layer for layer in model.modules() if type(layer).__name__ == "LlamaDecoderLayer"]
