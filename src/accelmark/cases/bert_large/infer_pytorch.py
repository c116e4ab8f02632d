"""Inference of BERT-large: predict the masked tokens of prepared sequences."""

from __future__ import annotations

import sys

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.infer.case import ClassificationCase, InferBatch, InMemoryBatches, swap_neighbours
from accelmark.infer.weights import pretrained
from accelmark.spec.errors import UNREADABLE, DataError, raising


class Case(ClassificationCase):
    """Sequences from ``bert_large/sequences.safetensors`` below the data directory.

    It holds ``tokens``, ``mask`` and ``labels`` of shape (sequences, length), int64; a label of -100 is not masked.
    """

    input_names = ("tokens", "mask")
    metric = "mlm_accuracy"

    def build_dataloader(self) -> InMemoryBatches:
        path = self.data_dir("sequences", "sequences/sequences.safetensors") / "sequences.safetensors"
        sys.audit("open", str(path), "r", 0)  # the library opens it itself
        with raising(DataError, f"{path}: expected tokens, mask and labels", SafetensorError, *UNREADABLE):
            tokens, mask, labels = map(load_file(path).__getitem__, ("tokens", "mask", "labels"))
        return InMemoryBatches((tokens, mask), labels, self.settings.batch_size)

    def create_model(self) -> nn.Module:
        config = BertConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            intermediate_size=self.number("intermediate_size"),
        )
        return pretrained(self, BertForMaskedLM(config))

    def perturbed(self, batch: InferBatch, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Exchange two neighbouring tokens that are neither masked nor padding."""
        tokens, mask = batch.inputs
        movable = mask.bool() & (batch.labels == -100) if batch.labels is not None else mask.bool()
        return swap_neighbours(tokens, movable, generator), mask

    def synthetic_batch(self, size: int) -> InferBatch:
        length = self.number("seq_length")
        tokens = torch.randint(0, self.number("vocab_size"), (size, length))
        return InferBatch((tokens, torch.ones(size, length, dtype=torch.int64)), None)
