"""Language modelling: prediction of the next token, and of masked ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import FromArrays, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.tasks.language.data import masked_tokens
from accelmark.tasks.metrics import IGNORED, Classified, PredictedTokens

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart


class NextToken(PredictedTokens, TaskFamily):
    """Next-token prediction over samples of ``seq_length + 1`` tokens."""

    dtype: ClassVar[torch.dtype] = torch.int64

    def synthetic_batch(self, size: int) -> Batch:
        """Return random tokens."""
        shape, random = (size, self.number("seq_length") + 1), generator_for(self.place.seed)
        return {self.tokens: torch.randint(0, self.vocab_size, shape, generator=random, dtype=self.dtype)}

    def model_input(self, batch: Batch) -> Tensor:
        """Return all tokens but the last of each sample."""
        return batch[self.tokens].long()[:, :-1]

    @property
    def of_sequence(self) -> dict[str, SequencePart]:
        """Return the argument with which a model returns the output of this rank's part of whole sequences."""
        return {} if self.sequence is None else {"sequence": self.sequence}

    def _labels(self, batch: Batch) -> Tensor:
        labels = batch[self.tokens].long()[:, 1:]
        return labels if self.sequence is None else self.sequence.of(labels)

    def _loss(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        logits: Tensor = model(self.model_input(batch), **self.of_sequence)
        labels = self._labels(batch)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats."""
        return self._loss(model, batch, "mean")

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the cross entropies of the tokens."""
        return {"loss": self._loss(model, batch, "sum"), "count": torch.ones_like(self._labels(batch)).sum()}


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


class MaskedTokens(Classified, TaskFamily):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory.

    A batch has ``tokens``, and ``positions`` with ``labels`` of shape (batch, predictions); of pairs of texts also
    ``segments`` and ``num_tokens``.
    """

    accuracies: ClassVar = {"mlm_accuracy": 1}
    shards: ClassVar[str]
    """Name of the data set, with the initial checkpoint in its folder ``initial``."""
    block_class = "BertLayer"

    def build_model(self) -> nn.Module:
        """Build BERT (Devlin et al. 2018, arXiv:1810.04805), with the initial checkpoint's weights."""
        from transformers import BertConfig, BertForMaskedLM

        from accelmark.frameworks.pytorch.model.pretrained import load_pretrained

        config = BertConfig(**self.dimensions(), max_position_embeddings=self.number("max_positions"))
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            return MaskedLm(load_pretrained(BertForMaskedLM, config, self.data_dirs[self.shards] / "initial"))
        return MaskedLm(BertForMaskedLM(config))

    def dataset(self, *, train: bool) -> FromArrays:
        """Return windows of ``train``, masked anew in each epoch, or of ``val``, masked the same each time."""
        sizes = (self.number(name) for name in ("seq_length", "max_predictions", "vocab_size"))
        return FromArrays(masked_tokens(self.data_dirs[self.shards], "train" if train else "val", *sizes))

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
