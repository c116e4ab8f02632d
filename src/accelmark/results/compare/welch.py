"""The difference of two means with its 95 % interval, where the spreads need not be equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class MeanDifference:
    """Second mean less the first; ``interval`` is null where a side has fewer than two values."""

    difference: float
    interval: tuple[float, float] | None
    degrees: float | None
    """Degrees of freedom by Welch and Satterthwaite; null where nothing varies."""


def mean_difference(first: Sequence[float], second: Sequence[float]) -> MeanDifference:
    """Return mean(second) - mean(first) with Welch's 95 % interval.

    Source: B. L. Welch, Biometrika 34 (1947); degrees of freedom after F. E. Satterthwaite, Biometrics 2 (1946).

    Raises:
        ValueError: a side holds no value.
    """
    if not first or not second:
        raise ValueError("both sides need a value")
    means = [_mean(first), _mean(second)]
    difference = means[1] - means[0]
    if min(len(first), len(second)) < 2:
        return MeanDifference(difference, None, None)
    parts = [
        math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
        for values, mean in zip((first, second), means, strict=True)
    ]
    error = math.fsum(parts)
    if error == 0:
        return MeanDifference(difference, (difference, difference), None)
    # Shares of the variance, so that squares of tiny variances do not vanish.
    shares = [part / error for part in parts]
    degrees = 1 / math.fsum(share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True))
    from scipy.special import stdtrit

    half = float(stdtrit(degrees, 0.975)) * math.sqrt(error)
    return MeanDifference(difference, (difference - half, difference + half), degrees)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; of values that are all the same that value, so that rounding makes no spread of them."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
