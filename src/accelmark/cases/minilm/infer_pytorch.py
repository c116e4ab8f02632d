"""Inference of the MiniLM sentence encoder: embeddings of passages that a linear probe classifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from accelmark.cases.minilm._probe import load_probe
from accelmark.cases.minilm._text import CONFIG, SentenceEncoder, read_text
from accelmark.infer.batches import TensorBatches
from accelmark.infer.case import InferBatch, InferCase


class Case(InferCase):
    """Embedding of the held-out act's passages, tokenised in memory; the evaluation applies the probe."""

    input_names = ("tokens", "mask")
    output_names = ("sentence",)

    def build_dataloader(self) -> TensorBatches:
        """Read and tokenise the passages."""
        tokens, mask, labels = read_text(
            self.data_dirs,
            held_out=True,
            limit=self.number("passages"),
            seq_length=self.number("seq_length"),
            passage_chars=self.number("passage_chars"),
        )
        self.weight, self.bias = load_probe()
        return TensorBatches((tokens, mask), labels, self.settings.batch_size)

    def create_model(self) -> nn.Module:
        """Build the encoder with its packaged weights."""
        model = SentenceEncoder()
        if not self.settings.synthetic:
            model.encoder.load(self.data_dirs["minilm"] / "model.safetensors")
        return model

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count passages that the probe classifies correctly."""
        right = (outputs[0] @ self.weight.T + self.bias).argmax(1) == labels
        return {"right": float(right.sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the probe's accuracy."""
        return {"accuracy": sums["right"] / sums["count"]}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random tokens without padding."""
        length = self.number("seq_length")
        tokens = torch.randint(1000, CONFIG.vocab_size, (size, length))
        return InferBatch((tokens, torch.ones(size, length, dtype=torch.int64)), None)
