"""Masked-language-model pretraining of BERT-large in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.frameworks.pytorch.model.pretrained import load_pretrained
from accelmark.tasks.language.pytorch import MaskedTokens


class MaskedLm(nn.Module):
    """BERT of transformers, computing vocabulary logits at the masked positions only."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, num_tokens: Tensor | None = None
    ) -> Tensor:
        """Return logits of shape (batch, positions, vocabulary); no token sees one after ``num_tokens``."""
        mask = None
        if num_tokens is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens[:, None]
        found = self.net.bert(input_ids=tokens, token_type_ids=segments, attention_mask=mask)
        hidden: Tensor = found.last_hidden_state
        picked = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self.net.cls(picked)
        return logits


class Case(MaskedTokens):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory."""

    shards = "bert_tokens"
    block_class = "BertLayer"

    def build_model(self) -> nn.Module:
        """Build BERT-large (Devlin et al. 2018, arXiv:1810.04805), with the initial checkpoint's weights."""
        config = BertConfig(**self.dimensions(), max_position_embeddings=self.number("max_positions"))
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            return MaskedLm(load_pretrained(BertForMaskedLM, config, self.data_dirs[self.shards] / "initial"))
        return MaskedLm(BertForMaskedLM(config))
