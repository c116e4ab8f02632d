"""Fine-tuning of a pretrained sentence encoder to classify passages by kind of play, in PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from accelmark.cases.minilm_finetune._encoder import Encoder, EncoderConfig
from accelmark.cases.minilm_finetune._passages import KINDS, Passage, read_passages, split_passages
from accelmark.frameworks.pytorch.case import Batch, Batches
from accelmark.frameworks.pytorch.data.batches import TensorBatches, generator_for
from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.frameworks.pytorch.tasks.classification import Classification
from accelmark.train.formulas import attention_flops, dense_flops


class Classifier(nn.Module):
    """Mean of the hidden states over non-padding tokens, dropout, and a linear classifier."""

    def __init__(self, config: EncoderConfig, num_classes: int) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        hidden: Tensor = self.encoder(tokens, mask)
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        logits: Tensor = self.head(self.dropout((hidden * weight).sum(1) / weight.sum(1)))
        return logits


class Case(Classification):
    """Text classification; all passages are tokenised once and kept in memory."""

    inputs = ("tokens", "mask")
    accuracies: ClassVar = {"accuracy": 1}
    block_class = "EncoderLayer"

    def build_model(self) -> nn.Module:
        """Build the encoder with its packaged weights, and a new head."""
        model = Classifier(self._config, len(KINDS))
        if not self.settings.loader.synthetic:
            model.encoder.load(self.data_dirs["minilm"] / "model.safetensors")
        return model

    @property
    def _config(self) -> EncoderConfig:
        names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size", "max_positions")
        return EncoderConfig(**{name: self.number(name) for name in names})

    def _passages(self, *, held_out: bool, limit: int | None) -> dict[str, Tensor]:
        passages = read_passages(self.data_dirs["shakespeare"], self.number("passage_chars"))
        return self._encode(split_passages(passages, held_out=held_out, limit=limit))

    def _encode(self, passages: list[Passage]) -> dict[str, Tensor]:
        tokenizer = Tokenizer.from_file(str(self.data_dirs["minilm"] / "tokenizer.json"))
        length = self.number("seq_length")
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        encoded: list[Any] = tokenizer.encode_batch([passage.text for passage in passages])
        label = torch.tensor([passage.kind for passage in passages])
        mask = torch.tensor([one.attention_mask for one in encoded]).bool()
        return {"tokens": torch.tensor([one.ids for one in encoded]), "mask": mask, "label": label}

    def train_batches(self) -> Batches:
        """Return the passages of all acts but one."""
        data = self._passages(held_out=False, limit=None)
        return TensorBatches(data, self.settings.batch_size, self.place, train=True)

    def eval_batches(self) -> Batches:
        """Return ``eval_passages`` passages of the held-out act."""
        data = self._passages(held_out=True, limit=self.number("eval_passages"))
        return TensorBatches(data, self.settings.eval_batch_size, self.place, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return random tokens without padding."""
        random, length = generator_for(self.place.seed), self.number("seq_length")
        return {
            "tokens": torch.randint(1, self._config.vocab_size, (size, length), generator=random),
            "mask": torch.ones(size, length, dtype=torch.bool),
            "label": torch.randint(0, len(KINDS), (size,), generator=random),
        }

    def flops_per_sample(self) -> float:
        """Count encoder, head and attention over all tokens including padding (PaLM, arXiv:2204.02311, appendix B)."""
        config, length = self._config, self.number("seq_length")
        hidden, layers = config.hidden_size, config.num_layers
        weights = layers * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
        dense = dense_flops(weights, length) + dense_flops(hidden * len(KINDS), 1)
        return dense + attention_flops(layers, hidden, length)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer; the head's learning rate is ``head_lr_ratio`` times the encoder's."""
        optimizer = build_optimizer(model, self.settings.optimizer, self.place.device)
        head = {parameter for name, parameter in model.named_parameters() if "head" in name.split(".")}
        for group in list(optimizer.param_groups):
            own = [parameter for parameter in group["params"] if parameter in head]
            group["params"] = [parameter for parameter in group["params"] if parameter not in head]
            if own:
                optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * self.number("head_lr_ratio")})
        return optimizer
