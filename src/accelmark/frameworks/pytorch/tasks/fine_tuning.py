"""Fine-tuning of a pretrained decoder by low-rank adaptation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from accelmark.frameworks.pytorch.data.batches import FromArrays
from accelmark.frameworks.pytorch.model.low_rank import adapt
from accelmark.frameworks.pytorch.tasks.decoder import Pretraining
from accelmark.spec.errors import DataError
from accelmark.train.tasks.token_shards import TokenShards


class LowRankTuning(Pretraining):
    """Training of low-rank changes of a checkpoint's linear layers; all other weights are frozen.

    Samples are packed rows of ``seq_length + 1`` tokens, one after another. The settings ``lora_rank``, ``lora_alpha``
    and ``lora_dropout`` under ``model`` are those of :class:`accelmark.frameworks.pytorch.model.low_rank.LowRank`.
    """

    adapted: ClassVar[Sequence[Sequence[str]]]
    """Names of the layers, in groups that share their input; see :func:`adapt`."""

    def build_model(self) -> nn.Module:
        """Build the decoder with the checkpoint's weights and unchanged outputs."""
        model = super().build_model()
        alpha, dropout = (float(self.settings.model[name] or 0) for name in ("lora_alpha", "lora_dropout"))
        adapt(model, self.adapted, self.number("lora_rank"), alpha, dropout)
        return model

    def dataset(self, *, train: bool) -> FromArrays | dict[str, Tensor]:
        """Return the rows of ``train`` or of ``val``."""
        row = self.number("seq_length") + 1
        split = "train" if train else "val"
        return FromArrays(TokenShards(self.data_dirs[self.shards], split, row, row, self.vocab_size))


def packed_rows(texts: Sequence[str], tokenizer: Tokenizer, length: int, file: Path) -> Tensor:
    """Return the tokens of all texts of ``file``, one after another, in rows of ``length`` tokens without padding.

    The tokens that fill no row are left out. Shape (rows, length), int32.

    Raises:
        DataError: there are too few tokens.
    """
    tokens = torch.tensor([token for one in tokenizer.encode_batch(texts) for token in one.ids], dtype=torch.int32)
    if len(tokens) < length:
        raise DataError(f"{file}: has {len(tokens)} tokens, less than a row of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)
