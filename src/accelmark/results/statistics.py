"""Welch's confidence interval of a difference of means, and change points of a time series."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

MIN_SEGMENT: Final = 2
"""Smallest number of runs between two changes: a single run is an outlier, not a level."""
_PENALTY: Final = 5
_MAD_TO_SIGMA: Final = 1.4826
_OUTLIER_SIGMA: Final = 3
"""Distance from the median of its neighbours, in units of noise, to which a value is clipped."""
_MIN_NOISE: Final = 1e-3
"""Smallest assumed noise, relative to the level."""


def mean_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Return mean(second) - mean(first) and its 95 % interval by Welch's t-test; None where a side has one value."""
    difference = _mean(second) - _mean(first)
    if min(len(first), len(second)) < 2:
        return difference, None
    if min(first) == max(first) and min(second) == max(second):
        return difference, (difference, difference)
    from scipy.stats import ttest_ind  # takes about a second to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # of a side without variance
        interval = ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    return difference, (float(interval.low), float(interval.high))


def relative_difference(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return how much larger ``second`` is, as a share of ``first``, and its 95 % interval.

    It is the ratio of the geometric means minus 1, with Welch's interval of the logarithms, so that it never falls
    below -100 %. None where a value is not positive.
    """
    if min(*first, *second) <= 0:
        return None, None
    difference, interval = mean_difference([math.log(x) for x in first], [math.log(x) for x in second])
    return math.expm1(difference), interval and (math.expm1(interval[0]), math.expm1(interval[1]))


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else fmean(values)  # without rounding where all are equal


def change_points(values: Sequence[float]) -> list[int]:
    """Return the index of the first value of every new level.

    Optimal partitioning (Jackson et al., IEEE Signal Processing Letters 12, 2005) of a mean that changes under
    Gaussian noise: the sum of squares within segments over the noise's variance, plus 5 ln n for each change. The
    noise is estimated from the median difference of neighbours, which changes of level do not affect. Outliers are
    clipped first, since the square of one would create a level of two runs around it. O(n^2).
    """
    count = len(values)
    if count < 2 * MIN_SEGMENT:
        return []
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    noise = max(_MAD_TO_SIGMA * median(steps) / math.sqrt(2), _MIN_NOISE * abs(median(values)))
    noise = noise or max(max(steps), 1.0) * _MIN_NOISE
    centre = median(values)
    sums, squares = [0.0], [0.0]
    for position, value in enumerate(values):
        first = min(max(position - 1, 0), count - 3)
        middle = median(values[first : first + 3])  # of it and its neighbours
        limit = _OUTLIER_SIGMA * noise
        scaled = (min(max(value, middle - limit), middle + limit) - centre) / noise
        sums.append(sums[-1] + scaled)
        squares.append(squares[-1] + scaled * scaled)
    penalty = _PENALTY * math.log(count)
    best = [-penalty] + [math.inf] * count
    previous = [0] * (count + 1)
    for end in range(MIN_SEGMENT, count + 1):
        for start in range(end - MIN_SEGMENT + 1):
            if math.isinf(best[start]):
                continue
            total = sums[end] - sums[start]
            cost = best[start] + squares[end] - squares[start] - total * total / (end - start) + penalty
            if cost < best[end]:
                best[end], previous[end] = cost, start
    changes: list[int] = []
    end = previous[count]
    while end > 0:
        changes.append(end)
        end = previous[end]
    return changes[::-1]


def levels(values: Sequence[float], changes: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return (first index, index after the last, mean) of each segment between changes."""
    edges = [0, *changes, len(values)]
    return [(begin, end, fmean(values[begin:end])) for begin, end in itertools.pairwise(edges) if end > begin]
