"""Inference of BERT-large: predict the masked tokens of prepared sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from accelmark.infer.batches import TensorBatches
from accelmark.infer.case import InferBatch, InferCase
from accelmark.infer.weights import load_weights
from accelmark.spec.errors import DataError

_IGNORED = -100


class _Logits(nn.Module):
    """Wrapper of transformers' model that returns a plain tensor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        logits: Tensor = self.net(input_ids=tokens, attention_mask=mask).logits
        return logits


class Case(InferCase):
    """Sequences from ``bert_large/sequences.safetensors`` below the data directory.

    It holds ``tokens``, ``mask`` and ``labels`` of shape (sequences, length), int64; a label of -100 is not masked.
    """

    input_names = ("tokens", "mask")
    output_names = ("logits",)

    def build_dataloader(self) -> TensorBatches:
        """Read the prepared sequences."""
        directory = self.data_dirs.get("sequences")
        path = directory / "sequences.safetensors" if directory is not None else Path("sequences.safetensors")
        if directory is None or not path.is_file():
            raise DataError(
                f"{path} is not here: name a directory that holds sequences/sequences.safetensors (--data DIR), or "
                "measure speed only with made-up data (--synthetic)"
            )
        from safetensors.torch import load_file

        held = load_file(path)
        if not {"tokens", "mask", "labels"} <= held.keys():
            raise DataError(f"{path}: has to hold tokens, mask and labels, found {', '.join(sorted(held))}")
        return TensorBatches((held["tokens"], held["mask"]), held["labels"], self.settings.batch_size)

    def create_model(self) -> nn.Module:
        """Build the network, with the weights from the data directory."""
        config = BertConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            intermediate_size=self.number("intermediate_size"),
        )
        net = BertForMaskedLM(config)
        self.trained = "weights" in self.data_dirs
        if self.trained:
            load_weights(net, self.data_dirs["weights"])
        return _Logits(net)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Count correctly predicted masked tokens."""
        masked = labels != _IGNORED
        right = (outputs[0].argmax(2) == labels) & masked
        return {"right": float(right.sum()), "count": float(masked.sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of correctly predicted masked tokens."""
        return {"mlm_accuracy": sums["right"] / max(1.0, sums["count"])}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random tokens."""
        length = self.number("seq_length")
        tokens = torch.randint(0, self.number("vocab_size"), (size, length))
        return InferBatch((tokens, torch.ones(size, length, dtype=torch.int64)), None)
