"""Detect a cache of outputs: repeated items must not run faster than new ones.

Modelled on MLPerf's compliance test TEST04, including its limit of 10 %.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations
from typing import Final

from accelmark.spec.log.inference import RepeatCheck

LIMIT: Final = 1.1
"""Ratio of first to repeated calls above which outputs seem to be cached."""
CALLS: Final = 5
"""Times that each batch is computed."""
_MIN_BATCHES: Final = 4
_FIRST: Final = 1
_EARLY: Final = 2
_FALSE_ALARMS: Final = Fraction(2, 1000)
"""Maximum probability of a false alarm, independent of other load."""
_LEVELS: Final = {_FIRST: Fraction(16, 10000), _EARLY: Fraction(4, 10000)}
"""Significance level of each test: the first call against the others, the first two against the others."""


def repeat_check(calls_ms: Sequence[Sequence[float]]) -> RepeatCheck:
    """Compare the time of each batch's first computation with its repetitions, to detect a cache.

    ``calls_ms`` has ``CALLS`` durations of each batch, in their order and by the rank's clock. Before each of them the
    inputs are copied and another batch is computed, so that caches of the processor and waking threads favour none.
    A batch is compared with itself only, since items differ in work.

    Disturbance by other processes is handled by a test. In each batch every early call is compared with every later
    one and counts as slower when it took over ``LIMIT`` times as long; the counts are added over all batches. Without
    a cache each order of a batch's five calls is equally likely, which gives the exact distribution of the sum (a
    one-sided Mann-Whitney test, stratified by batch). Two tests are made:

    * the first call against the other four, at 0.0016: detects a cache that answers from the second call on;
    * the first two calls against the other three, at 0.0004: detects a cache that stores items at their second call.

    An engine is suspicious when one of them is significant and the median over batches of the first call over the
    median of the last three is above ``LIMIT``: a false alarm in at most 2 of 1,000 runs, the sum of both levels.
    """
    number = len(calls_ms)
    if number < _MIN_BATCHES:
        reason = f"needs at least {_MIN_BATCHES} batches, {number} were computed again"
        return RepeatCheck(
            fresh_ms=None, same_ms=None, speedup=None, limit=LIMIT, suspicious=False, num_batches=number, reason=reason
        )
    late_ms = [statistics.median(calls[_EARLY:]) for calls in calls_ms]
    speedup = statistics.median(calls[0] / late for calls, late in zip(calls_ms, late_ms, strict=True))
    chance = _p_value(calls_ms)
    return RepeatCheck(
        fresh_ms=statistics.median(calls[0] for calls in calls_ms),
        same_ms=statistics.median(late_ms),
        speedup=speedup,
        chance=float(chance),
        limit=LIMIT,
        suspicious=speedup > LIMIT and chance <= _FALSE_ALARMS,
        num_batches=number,
    )


def _p_value(calls_ms: Sequence[Sequence[float]]) -> Fraction:
    """Return an upper bound of the probability that either test is as extreme as this without a cache."""
    found = []
    for early, level in _LEVELS.items():
        slower = sum(_slower(calls, early, LIMIT) for calls in calls_ms)
        found.append(_at_least(slower, early, len(calls_ms)) * _FALSE_ALARMS / level)
    return min(Fraction(1), *found)


def _slower(calls: Sequence[float], early: int, limit: float) -> int:
    """Count the pairs of an early and a later call in which the early one took over ``limit`` times as long."""
    return sum(one > limit * other for one in calls[:early] for other in calls[early:])


def _at_least(slower: int, early: int, number: int) -> Fraction:
    """Return the probability of at least ``slower`` pairs over ``number`` batches if all orders are equally likely."""
    sums = _sums(early, number)
    return Fraction(sum(count for total, count in sums.items() if total >= slower), sum(sums.values()))


@cache
def _sums(early: int, number: int) -> Mapping[int, int]:
    """Return {sum of slower pairs: number of orders of the calls of ``number`` batches with this sum}."""
    if number == 0:
        return {0: 1}
    ways = Counter(_slower(order, early, 1.0) for order in permutations(range(CALLS)))
    sums: Counter[int] = Counter()
    for total, count in _sums(early, number - 1).items():
        for more, each in ways.items():
            sums[total + more] += count * each
    return sums
