"""The sentence encoder, and the labelled passages as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn

from accelmark.cases.minilm_finetune._encoder import Encoder, EncoderConfig
from accelmark.cases.minilm_finetune._passages import read_passages, split_passages

CONFIG: Final = EncoderConfig(
    hidden_size=384, intermediate_size=1536, num_layers=6, num_heads=12, vocab_size=30522, max_positions=512
)


class SentenceEncoder(nn.Module):
    """Encoder that returns the normalised mean of hidden states over non-padding tokens, as all-MiniLM-L6-v2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(CONFIG)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings of shape (batch, 384); ``mask`` is 0 on padding."""
        hidden: Tensor = self.encoder(tokens, mask.bool())
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1))


def read_text(
    data_dirs: Mapping[str, Path], *, held_out: bool, limit: int, seq_length: int, passage_chars: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and mask, int64 of shape (passages, seq_length), and labels.

    Raises:
        DataError: the plays or the tokenizer are missing.
    """
    passages = split_passages(read_passages(data_dirs["shakespeare"], passage_chars), held_out=held_out, limit=limit)
    tokenizer = Tokenizer.from_file(str(data_dirs["minilm"] / "tokenizer.json"))
    tokenizer.enable_truncation(seq_length)
    tokenizer.enable_padding(length=seq_length)
    encoded: list[Any] = tokenizer.encode_batch([passage.text for passage in passages])
    tokens = torch.tensor([one.ids for one in encoded])
    mask = torch.tensor([one.attention_mask for one in encoded])
    return tokens, mask, torch.tensor([passage.kind for passage in passages])
