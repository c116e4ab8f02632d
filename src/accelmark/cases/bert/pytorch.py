"""Masked-language-model pretraining of BERT-large in PyTorch."""

from __future__ import annotations

from typing import Final

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.cases.bert._masking import MaskedWindows
from accelmark.frameworks.pytorch.case import Batches
from accelmark.frameworks.pytorch.data.batches import IndexedBatches
from accelmark.frameworks.pytorch.tasks.language_modelling import MaskedTokens
from accelmark.frameworks.pytorch.tasks.token_shards import TokenShards
from accelmark.spec.errors import DataError
from accelmark.train.formulas import attention_flops, dense_flops

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
        if set(absent) - tied:
            raise DataError(f"{path}: lacks {', '.join(sorted(set(absent) - tied)[:3])}: is it a BertForMaskedLM?")

    def _batches(self, split: str, size: int, *, train: bool) -> Batches:
        length, vocabulary = self.number("seq_length"), self.number("vocab_size")
        shards = TokenShards(self.data_dirs["bert_tokens"], split, length - 2, length - 2, vocabulary)
        windows = MaskedWindows(shards, self.number("max_predictions"), vocabulary)
        return IndexedBatches(windows, size, self.place, self.settings.loader, train=train)

    def train_batches(self) -> Batches:
        """Return windows of ``train``, masked anew in each epoch."""
        return self._batches("train", self.settings.batch_size, train=True)

    def eval_batches(self) -> Batches:
        """Return windows of ``val``, masked identically in every evaluation."""
        return self._batches("val", self.settings.eval_batch_size, train=False)

    def flops_per_sample(self) -> float:
        """Count encoder, head on masked tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
        hidden, length, layers = self.number("hidden_size"), self.number("seq_length"), self.number("num_layers")
        encoder = layers * (4 * hidden * hidden + 2 * hidden * self.number("intermediate_size"))
        head = hidden * hidden + hidden * self.number("vocab_size")
        dense = dense_flops(encoder, length) + dense_flops(head, self.number("max_predictions"))
        return dense + attention_flops(layers, hidden, length)
