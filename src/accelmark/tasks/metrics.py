"""Metrics from sums over batches and ranks, and the families of tasks that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from accelmark.train.case import IGNORED as IGNORED
from accelmark.train.case import ModelSettings

_LARGEST_EXPONENT = 700.0
"""Above it, ``exp`` overflows a double."""


def classification_metrics(sums: Mapping[str, float], accuracies: Iterable[str]) -> dict[str, float]:
    """Return each accuracy (``sums`` has the number of correct samples under its name) and the mean loss."""
    count = sums["count"]
    return {**{name: sums[name] / count for name in accuracies}, "eval_loss": sums["loss"] / count}


def language_model_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the mean cross entropy of a token in nats, its exponential, and in bits."""
    loss = sums["loss"] / sums["count"]
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    return {"eval_loss": loss, "perplexity": perplexity, "bits_per_token": loss / math.log(2)}


class Classified:
    """Classification with one label per sample."""

    accuracies: ClassVar[Mapping[str, int]] = {"top1": 1}
    """Metric -> number of best classes that must include the label."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the accuracies and the mean loss."""
        return classification_metrics(sums, self.accuracies)


class ImageSizes(ModelSettings):
    """Images as bytes; the size and number of classes are the settings of these names."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return 3, self.number("image_size"), self.number("image_size")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.number("num_classes")


class PredictedTokens(ModelSettings):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the last one is only predicted."""

    tokens: ClassVar[str] = "tokens"
    """Name of the batch's only array or tensor, of shape (batch, seq_length + 1)."""
    reported: ClassVar[Mapping[str, str]] = {"eval_loss": "eval_loss", "perplexity": "perplexity"}
    """Metric of the case -> metric of the family."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.number("vocab_size")

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics of a held-out token."""
        values = language_model_metrics(sums)
        return {name: values[source] for name, source in self.reported.items()}
