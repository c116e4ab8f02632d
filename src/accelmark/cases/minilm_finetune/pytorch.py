"""Fine-tuning of a pretrained sentence encoder to classify passages by kind of play, in PyTorch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from accelmark.cases.minilm_finetune._passages import KINDS, read_text
from accelmark.frameworks.pytorch.optimizers import build_optimizer, with_own_rate
from accelmark.tasks.text.pytorch import Encoder, EncoderConfig, TextClassification, mean_state


class Classifier(nn.Module):
    """Mean of the hidden states over non-padding tokens, dropout, and a linear classifier."""

    def __init__(self, config: EncoderConfig, num_classes: int) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)
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
        model = Classifier(self.config, self.num_classes)
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
