"""The interface of a case of offline generation: a language model in Hugging Face's layout, scored by perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Generator, Tensor, nn

from accelmark.infer.batches import InMemoryBatches
from accelmark.infer.case import InferBatch, InferCase, swap_neighbours
from accelmark.infer.language_model.model import load_model
from accelmark.serving.model import ServedModel
from accelmark.spec.errors import DataError
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.training import Scalar


class LanguageModelCase(InferCase):
    """A language model: subclass it as ``Case`` in ``cases/<model>/infer_pytorch.py``.

    An item is a window of the case's text, ``seq_length`` tokens long; ``windows`` of them are spread evenly over it.
    """

    input_names = ("tokens",)
    output_names = ("nats",)

    def __init__(
        self,
        settings: InferSettings,
        parameters: Mapping[str, Scalar],
        data_dirs: Mapping[str, Path],
        model: ServedModel,
    ) -> None:
        super().__init__(settings, parameters, data_dirs)
        self.served = model
        if settings.synthetic or model.directory is None or model.tokens is None:
            what = "synthetic data is not possible" if settings.synthetic else "the model has no weights or tokenizer"
            raise DataError(f"{what}: generation needs a directory of weights in Hugging Face's layout")
        self.directory = model.directory

    @final
    def build_dataloader(self) -> InMemoryBatches:
        """Tokenise the text."""
        encode = self.served.tokens
        assert encode is not None  # noqa: S101 - checked at the start
        tokens, length = encode(self.served.prompt_text()), self.number("seq_length")
        if len(tokens) < length:
            raise DataError(f"the text has {len(tokens)} tokens, parameters.seq_length is {length}")
        wanted = min(self.number("windows"), len(tokens) // length)
        begins = np.linspace(0, len(tokens) - length, wanted).astype(np.int64).tolist()
        windows = torch.tensor([tokens[begin : begin + length] for begin in begins])
        return InMemoryBatches((windows,), windows[:, 1:].clone(), self.settings.batch_size)

    @final
    def create_model(self) -> nn.Module:
        """Load the model."""
        return load_model(self.directory)

    @final
    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Sum the negative log-likelihoods."""
        return {"nats": float(outputs[0].double().sum()), "count": float(labels.numel())}

    @final
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity: exp of the mean negative log-likelihood of a token."""
        return {"perplexity": math.exp(min(sums["nats"] / max(1.0, sums["count"]), 700.0))}

    @final
    def synthetic_batch(self, size: int) -> InferBatch:
        """Refuse: a text is needed."""
        raise DataError("generation has no synthetic data")

    @final
    def perturbed(self, batch: InferBatch, generator: Generator) -> tuple[Tensor, ...]:
        """Exchange two neighbouring tokens in each window."""
        tokens = batch.inputs[0]
        return (swap_neighbours(tokens, torch.ones_like(tokens, dtype=torch.bool), generator),)
