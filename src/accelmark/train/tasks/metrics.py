"""Metrics from sums over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

IGNORED: Final = -100
"""Label of a position that is not predicted."""
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
