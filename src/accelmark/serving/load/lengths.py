"""Numbers of tokens drawn from a distribution."""

from __future__ import annotations

import math

import numpy as np

from accelmark.spec.settings.serving import Lengths


def draw_length(lengths: Lengths, rng: np.random.Generator, most: int | None = None) -> int:
    """Return a number of tokens, at least 1 and at most ``most``.

    ``lognormal`` has the mean and standard deviation of ``lengths`` before it is cut: mu = ln(mean) - sigma²/2 and
    sigma² = ln(1 + stdev²/mean²).
    """
    if lengths.distribution == "fixed":
        drawn = lengths.mean
    elif lengths.distribution == "uniform":
        drawn = int(rng.integers(lengths.min or 1, lengths.max or lengths.mean, endpoint=True))
    else:
        variance = math.log1p((lengths.stdev / lengths.mean) ** 2)
        drawn = round(rng.lognormal(math.log(lengths.mean) - variance / 2, math.sqrt(variance)))
    drawn = max(drawn, lengths.min or 1)
    limits = [limit for limit in (lengths.max, most) if limit is not None]
    return min([drawn, *limits])


def longest(lengths: Lengths) -> int | None:
    """Return the greatest number of tokens that is drawn; None for a distribution without a limit."""
    return lengths.mean if lengths.distribution == "fixed" else lengths.max
