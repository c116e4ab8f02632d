"""Masked-language-model pretraining of BERT-large in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.frameworks.pytorch.batches import FromArrays, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.pretrained import load_pretrained
from accelmark.tasks.language.data import masked_tokens
from accelmark.tasks.metrics import IGNORED, Classified


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
        return self.net.cls(picked)


class Case(Classified, TaskFamily):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory.

    A batch has ``tokens``, and ``positions`` with ``labels`` of shape (batch, predictions); of pairs of texts also
    ``segments`` and ``num_tokens``.
    """

    accuracies: ClassVar = {"mlm_accuracy": 1}
    block_class = "BertLayer"

    def build_model(self) -> nn.Module:
        """Build BERT-large (Devlin et al. 2018, arXiv:1810.04805), with the initial checkpoint's weights."""
        config = BertConfig(**self.dimensions(), max_position_embeddings=self.number("max_positions"))
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            return MaskedLm(load_pretrained(BertForMaskedLM, config, self.data_dirs["bert_tokens"] / "initial"))
        return MaskedLm(BertForMaskedLM(config))

    def dataset(self, *, train: bool) -> FromArrays:
        """Return windows of ``train``, masked anew in each epoch, or of ``val``, masked the same each time."""
        sizes = (self.number(name) for name in ("seq_length", "max_predictions", "vocab_size"))
        return FromArrays(masked_tokens(self.data_dirs["bert_tokens"], "train" if train else "val", *sizes))

    def synthetic_batch(self, size: int) -> Batch:
        """Return random tokens, positions and labels."""
        random, vocabulary = generator_for(self.place.seed), self.number("vocab_size")
        length, predictions = self.number("seq_length"), self.number("max_predictions")
        return {
            "tokens": torch.randint(0, vocabulary, (size, length), generator=random),
            "positions": torch.randint(0, length, (size, predictions), generator=random),
            "labels": torch.randint(0, vocabulary, (size, predictions), generator=random),
        }

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"})

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the masked tokens."""
        logits = self._logits(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count the masked tokens that were predicted, and add up their cross entropies."""
        logits, labels = self._logits(model, batch), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        correct = (logits.argmax(-1) == labels).sum()
        return {"mlm_accuracy": correct, "loss": loss, "count": (labels != IGNORED).sum()}
