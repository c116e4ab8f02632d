"""Inference of the MiniLM sentence encoder: embeddings of passages that a linear probe classifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig

from accelmark.cases.minilm_finetune.pytorch import read_text
from accelmark.infer.case import ClassificationCase, InferBatch, InMemoryBatches, swap_neighbours
from accelmark.tasks.text.pytorch import Encoder, mean_state

_VOCABULARY: Final = 30522
PROBE: Final = Path(__file__).with_name("probe.safetensors")
"""Weight, of shape (kinds, 384), and bias, fitted by ``tests/cases/fit_minilm_probe.py``."""


class SentenceEncoder(nn.Module):
    """Encoder that returns the normalised mean of hidden states over non-padding tokens, as all-MiniLM-L6-v2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings of shape (batch, 384); ``mask`` is 0 on padding."""
        return F.normalize(mean_state(self.encoder(tokens, mask.bool()), mask))


class Case(ClassificationCase):
    """Embedding of the held-out act's passages, tokenised in memory; the evaluation applies the probe."""

    input_names = ("tokens", "mask")
    output_names = ("sentence",)
    metric = "accuracy"

    def build_dataloader(self) -> InMemoryBatches:
        tokens, mask, labels = self._passages(held_out=True, limit=self.number("passages"))
        self.probe = load_file(PROBE)
        return InMemoryBatches((tokens, mask), labels, self.settings.batch_size)

    def calibration_batch(self, size: int) -> InferBatch:
        """Read and tokenise passages of the other acts."""
        return InferBatch(self._passages(held_out=False, limit=size)[:2], None)

    def _passages(self, *, held_out: bool, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = {name: self.number(name) for name in ("seq_length", "passage_chars")}
        dirs = self.data_dirs
        return read_text(dirs["shakespeare"], dirs["minilm"], held_out=held_out, limit=limit, **sizes)

    def create_model(self) -> nn.Module:
        model = SentenceEncoder()
        if not self.settings.synthetic:
            model.encoder.load(self.data_dirs["minilm"] / "model.safetensors")
        return model

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count passages that the probe classifies correctly."""
        return super().evaluator([outputs[0] @ self.probe["weight"].T + self.probe["bias"]], labels)

    def perturbed(self, batch: InferBatch, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Exchange two neighbouring tokens between the first, which marks the sequence, and padding."""
        tokens, mask = batch.inputs
        movable = mask.bool()
        movable[:, 0] = False
        return swap_neighbours(tokens, movable, generator), mask

    def synthetic_batch(self, size: int) -> InferBatch:
        length = self.number("seq_length")
        tokens = torch.randint(1000, _VOCABULARY, (size, length))
        return InferBatch((tokens, torch.ones(size, length, dtype=torch.int64)), None)
