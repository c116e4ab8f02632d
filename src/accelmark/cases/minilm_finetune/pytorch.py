"""Fine-tuning of a pretrained sentence encoder to classify passages by kind of play, in PyTorch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig

from accelmark.frameworks.pytorch.optimizers import build_optimizer, with_own_rate
from accelmark.spec.errors import DataError
from accelmark.tasks.text.pytorch import DROPOUT, Encoder, TextClassification, mean_state, tokenize

KINDS: Final = ("comedies", "histories")
HELD_OUT_ACT: Final = "IV"
"""The act of every play that is held out from training."""
_HEADING: Final = re.compile(r"^#+\s*(?:ACT\s+([IVX]+))?", re.IGNORECASE)
_NOT_SPOKEN: Final = re.compile(r"^\*\*.*\*\*\s*$|^_.*_\s*$")
"""A speaker's name or a stage direction."""


class Passage(NamedTuple):
    """Consecutive spoken lines of one act."""

    text: str
    kind: int
    """Index into ``KINDS``."""
    act: str


def read_passages(directory: Path, num_chars: int) -> list[Passage]:
    """Split all plays into passages of about ``num_chars`` characters, in the order of the plays' paths.

    Raises DataError: ``directory`` lacks the plays of a kind.
    """
    passages: list[Passage] = []
    for kind, name in enumerate(KINDS):
        files = sorted(path for path in directory.rglob("*.md") if path.parent.name == name)
        if not files:
            raise DataError(f"{directory}: expected {name}/*.md (plays) below here, found none")
        for file in files:
            cut = _cut(file.read_text(encoding="utf-8").splitlines(), num_chars)
            passages += [Passage(text, kind, act) for act, text in cut]
    return passages


def split_passages(passages: list[Passage], *, held_out: bool, limit: int | None = None) -> list[Passage]:
    """Return the held-out or the other passages; if more than ``limit``, those with the lowest SHA-256."""
    chosen = [passage for passage in passages if (passage.act == HELD_OUT_ACT) == held_out]
    if limit is None or len(chosen) <= limit:
        return chosen
    return sorted(chosen, key=lambda passage: hashlib.sha256(passage.text.encode()).digest())[:limit]


def read_text(
    plays: Path, encoder: Path, *, held_out: bool, limit: int | None, seq_length: int, passage_chars: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and mask, int64 of shape (passages, seq_length), and labels, by the tokenizer in ``encoder``.

    Raises DataError: the plays are missing.
    """
    passages = split_passages(read_passages(plays, passage_chars), held_out=held_out, limit=limit)
    tokens, mask = tokenize(encoder / "tokenizer.json", [passage.text for passage in passages], seq_length)
    return tokens, mask, torch.tensor([passage.kind for passage in passages])


def _cut(lines: list[str], num_chars: int) -> Iterator[tuple[str, str]]:
    """Yield act and text of each passage; one that ends at a heading has at least half of the full length."""
    act = "0"
    passage: list[str] = []
    for line in [*lines, "#"]:
        heading = _HEADING.match(line)
        if heading is not None:
            if sum(map(len, passage)) >= num_chars // 2:
                yield act, " ".join(passage)
            passage = []
            act = (heading.group(1) or act).upper()
            continue
        spoken = line.strip()
        if not spoken or _NOT_SPOKEN.match(spoken):
            continue
        passage.append(spoken.replace("_", ""))
        if sum(map(len, passage)) >= num_chars:
            yield act, " ".join(passage)
            passage = []


class Classifier(nn.Module):
    """Mean of the hidden states over non-padding tokens, dropout, and a linear classifier."""

    def __init__(self, config: BertConfig, num_classes: int) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(config.hidden_size, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.head(self.dropout(mean_state(self.encoder(tokens, mask), mask)))
        return logits


class Case(TextClassification):
    """Text classification; all passages are tokenised once and kept in memory."""

    accuracies: ClassVar = {"accuracy": 1}
    num_classes = len(KINDS)

    def build_model(self) -> nn.Module:
        """Build the encoder with its packaged weights, and a new head."""
        config = BertConfig(**self.dimensions(), max_position_embeddings=self.number("max_positions"))
        model = Classifier(config, self.num_classes)
        if not self.settings.loader.synthetic:
            model.encoder.load(self.data_dirs["minilm"] / "model.safetensors")
        return model

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the passages of all acts but one, or ``eval_passages`` passages of the held-out act."""
        tokens, mask, label = read_text(
            self.data_dirs["shakespeare"],
            self.data_dirs["minilm"],
            held_out=not train,
            limit=None if train else self.number("eval_passages"),
            seq_length=self.number("seq_length"),
            passage_chars=self.number("passage_chars"),
        )
        return {"tokens": tokens, "mask": mask.bool(), "label": label}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer; the head's learning rate is ``head_lr_ratio`` times the encoder's."""
        optimizer = build_optimizer(model, self.settings.optimizer, self.place.device)
        return with_own_rate(optimizer, model, "head", self.number("head_lr_ratio"))
