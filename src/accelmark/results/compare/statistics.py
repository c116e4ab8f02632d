"""Welch's confidence interval of a difference, and change points of a time series."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, final


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


LEAST_SEGMENT: Final = 2
"""Runs between two changes: one run by itself is an outlier, not a level."""
_PENALTY: Final = 5
_NORMAL_MAD: Final = 1.4826
_NEAR: Final = 3
"""Noise that a value may lie from its neighbours' median before it counts as an outlier."""
_FLOOR: Final = 1e-3
"""Noise is taken to be at least this share of the level: no machine repeats itself more closely than that."""


def change_points(values: Sequence[float]) -> list[int]:
    """Return the index of the first value of every new level.

    Optimal partitioning (Jackson et al., IEEE Signal Processing Letters 12, 2005) of a mean that changes under
    Gaussian noise: the sum of squares within segments over the noise's variance, plus 5 ln n for each change. The
    noise is judged from differences of neighbours (their median, so that the changes themselves do not count). A
    value counts only as far as its neighbours bear it out (:func:`_moderated`): by its square, one outlier would draw
    a level of two runs around itself, which may even begin a run too early. O(n^2).
    """
    count = len(values)
    if count < 2 * LEAST_SEGMENT:
        return []
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    noise = max(_NORMAL_MAD * median(steps) / math.sqrt(2), _FLOOR * abs(median(values)))
    if noise == 0:
        noise = max(max(steps), 1.0) * _FLOOR
    centre = median(values)
    sums, squares = [0.0], [0.0]
    for value in _moderated(values, _NEAR * noise):
        scaled = (value - centre) / noise
        sums.append(sums[-1] + scaled)
        squares.append(squares[-1] + scaled * scaled)
    penalty = _PENALTY * math.log(count)
    best = [-penalty] + [math.inf] * count
    before = [0] * (count + 1)
    for end in range(LEAST_SEGMENT, count + 1):
        for start in range(end - LEAST_SEGMENT + 1):
            if math.isinf(best[start]):
                continue
            total = sums[end] - sums[start]
            cost = best[start] + squares[end] - squares[start] - total * total / (end - start) + penalty
            if cost < best[end]:
                best[end], before[end] = cost, start
    changes: list[int] = []
    end = count
    while end > 0:
        end = before[end]
        if end > 0:
            changes.append(end)
    return changes[::-1]


def _moderated(values: Sequence[float], most: float) -> Iterator[float]:
    """Yield each value, moved to within ``most`` of the median of it and its neighbours; ends look at three as well."""
    for position, value in enumerate(values):
        first = min(max(position - 1, 0), len(values) - 3)
        near = median(values[first : first + 3])
        yield min(max(value, near - most), near + most)


def levels(values: Sequence[float], changes: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return (first, past the last, mean) of each segment between changes."""
    edges = [0, *changes, len(values)]
    return [
        (begin, end, math.fsum(values[begin:end]) / (end - begin))
        for begin, end in itertools.pairwise(edges)
        if end > begin
    ]
