"""Masked-language-model pretraining of BERT-large in PyTorch."""

from __future__ import annotations

from typing import Final

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.frameworks.pytorch.data.batches import FromArrays
from accelmark.frameworks.pytorch.tasks.language_modelling import MaskedTokens
from accelmark.spec.errors import DataError
from accelmark.train.tasks.masked_windows import MaskedWindows
from accelmark.train.tasks.token_shards import TokenShards

CHECKPOINT: Final = "initial/model.safetensors"


class MaskedLm(nn.Module):
    """BERT of transformers, computing vocabulary logits at the masked positions only."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.net = BertForMaskedLM(config)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits of shape (batch, positions, vocabulary)."""
        hidden: Tensor = self.net.bert(input_ids=tokens).last_hidden_state
        picked = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self.net.cls(picked)
        return logits


class Case(MaskedTokens):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory."""

    block_class = "BertLayer"

    def build_model(self) -> nn.Module:
        """Build BERT-large (Devlin et al. 2018, arXiv:1810.04805), with the initial checkpoint's weights."""
        config = BertConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            intermediate_size=self.number("intermediate_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            max_position_embeddings=self.number("max_positions"),
        )
        model = MaskedLm(config)
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            self._load_checkpoint(model.net)
        return model

    def _load_checkpoint(self, net: nn.Module) -> None:
        path = self.data_dirs["bert_tokens"] / CHECKPOINT
        if not path.is_file():
            raise DataError(f"{path}: the initial checkpoint is missing; the case's README says where it comes from")
        absent = net.load_state_dict(load_file(path), strict=False).missing_keys
        tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
        lacking = sorted(set(absent) - tied)
        if lacking:
            raise DataError(f"{path}: lacks {', '.join(lacking[:3])}: is it a BertForMaskedLM?")

    def dataset(self, *, train: bool) -> FromArrays:
        """Return windows of ``train``, masked anew in each epoch, or of ``val``, masked the same each time."""
        length, vocabulary = self.number("seq_length"), self.number("vocab_size")
        split = "train" if train else "val"
        shards = TokenShards(self.data_dirs["bert_tokens"], split, length - 2, length - 2, vocabulary)
        return FromArrays(MaskedWindows(shards, self.number("max_predictions"), vocabulary))
