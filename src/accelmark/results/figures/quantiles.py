"""Percentiles with distribution-free 95 % intervals, for samples that depend on their neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from accelmark.results.figures.inference import latency_curve
from accelmark.results.serving_schema import PERCENTILES, Distribution, Quantile

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]

_BLOCKS: Final = 30
_MIN_IN_BLOCK: Final = 10
_MIN_BLOCKS: Final = 5
_TAIL: Final = 0.025
_Z: Final = 1.959964


def blocks_of(times: Floats) -> Integers:
    """Assign requests to blocks of neighbours in time: :data:`_BLOCKS`, or fewer of at least ten requests."""
    count = len(times)
    number = min(_BLOCKS, count // _MIN_IN_BLOCK)
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(times, kind="stable")] = np.arange(count)
    return ranks * max(number, 1) // max(count, 1)


def distribution(values: Floats, blocks: Integers, absent: str) -> Distribution:
    """Return percentiles of ``values``, whose samples of one block may depend on each other.

    The interval is that of the order statistics X(l) and X(u) with P(l <= B < u) >= 95 % for B binomial with the share
    of the percentile (Conover, Practical Nonparametric Statistics, 3.2). B counts independent samples: the number of
    samples over the design effect, which is the variance of the share of samples below the percentile between blocks
    over that of independent samples (Kish, Survey Sampling, 5.4). ``absent`` is the reason where there are no samples.
    """
    count = len(values)
    if not count:
        return Distribution(count=0, quantiles={name: Quantile(value=None, reason=absent) for name in PERCENTILES})
    ordered = np.sort(values)
    return Distribution(
        count=count,
        mean=float(values.mean()),
        quantiles={name: _quantile(values, ordered, blocks, share) for name, share in PERCENTILES.items()},
        curve=tuple((share, float(latency)) for share, latency in latency_curve(ordered)),
    )


def _quantile(values: Floats, ordered: Floats, blocks: Integers, share: float) -> Quantile:
    count = len(ordered)
    needed = math.ceil(1 / (1 - share) - 1e-9)
    if count < needed:
        return Quantile(value=None, reason=f"needs {needed:,} samples, {count:,} were measured")
    value = float(ordered[math.ceil(share * count - 1e-9) - 1])
    independent = max(round(count / design_effect(values <= value, blocks)), 1)
    low, high = interval_ranks(independent, share)
    scale = count / independent
    first = math.floor(low * scale) if low else 0
    last = math.ceil(high * scale - 1e-9) if high <= independent else count + 1
    return Quantile(
        value=value,
        low=float(ordered[max(first, 1) - 1]) if low else None,
        high=float(ordered[last - 1]) if last <= count else None,
        num_independent=independent,
    )


def design_effect(is_below: npt.NDArray[np.bool_], blocks: Integers) -> float:
    """Return how much larger the variance of a share is than that of independent samples, at least 1."""
    count, share = len(is_below), float(is_below.mean())
    sizes = np.bincount(blocks)
    if len(sizes) < _MIN_BLOCKS or not 0 < share < 1:
        return 1.0
    below = np.bincount(blocks, weights=is_below)
    between = len(sizes) / (len(sizes) - 1) * float(((below - share * sizes) ** 2).sum()) / count
    return max(between / (share * (1 - share)), 1.0)


def interval_ranks(count: int, share: float) -> tuple[int, int]:
    """Return the ranks (from 1) of the order statistics around a percentile.

    Rank 0 or ``count + 1``: the samples have no limit on this side.
    """
    from scipy.special import bdtr

    def below(rank: int) -> float:
        """P(B < rank)."""
        return float(bdtr(rank - 1, count, share)) if rank > 0 else 0.0

    low = _first(lambda rank: below(rank) > _TAIL, count) - 1
    high = _first(lambda rank: below(rank) >= 1 - _TAIL, count)
    return low, high


def _first(test: Callable[[int], bool], count: int) -> int:
    """Return the first rank from 1 that passes a monotonic test; ``count + 1`` where none does."""
    low, high = 1, count + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle + 1, high)
    return low


def share_interval(good: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``count`` > 0 samples (Wilson, JASA 22, 1927)."""
    share, square = good / count, _Z**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = _Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)
