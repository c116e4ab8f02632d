"""Looking for a cache: the same items again must not run suspiciously faster than fresh ones.

The idea is that of MLPerf's compliance test TEST04; the limit of 10 % is the one its rules state.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations
from typing import Final

import torch

from accelmark.infer.answers import check_declared
from accelmark.infer.case import InferBatch
from accelmark.infer.measure import Forward
from accelmark.spec.inference.events import RepeatCheck

LIMIT: Final = 1.1
"""Fresh over same beyond which outputs seem to be cached."""
_FEWEST: Final = 4
_CALLS: Final = 5
_FIRST: Final = 1
_EARLY: Final = 2
_CHANCE: Final = Fraction(2, 1000)
"""How often an honest engine may be suspected, on a machine however busy."""
_SHARES: Final = {_FIRST: Fraction(16, 10000), _EARLY: Fraction(4, 10000)}
"""What each test may take of it: the first call against the others, the first two against the others."""
_CLOCK_MS: Final = 1e-6
"""What a call takes at least, so that one answered at once can be divided by."""


def repeat_check(
    forward: Forward, warmed: InferBatch, fresh: Sequence[InferBatch], engine: str = "in hand"
) -> RepeatCheck:
    """Time every batch as it comes for the first time, and against itself as it comes again.

    An honest engine may find the same items faster too, for reasons that are not a cache of outputs; they are kept out.
    A batch is compared with itself, since items may differ in work; its memory is read before each call, since a batch
    out of main memory cost small models a fifth; a shape that did not come before is not counted, since engines prepare
    for shapes. Of the time that an engine declares as not inference, a batch is spared what all its calls declare:
    what only the first declares may be the work that a cache saves the others.

    Nor is a busy machine a suspicion. In each batch every early call is compared with every later one, and it counts
    as slower when it took over ``LIMIT`` times as long; the counts are added up over all batches. Where nothing but
    disturbance tells the five calls of a batch apart, each order of them is equally likely, which gives the exact
    distribution of the sum (a Mann-Whitney test, one-sided, each batch a stratum). Two such tests are made:

    * the first call against the other four, at 0.0016, which a cache fails that answers from the second sighting on;
    * the first two calls against the other three, at 0.0004, which one fails that only keeps what came twice.

    An engine is suspected when one of them comes to its share or below and the median over batches of the first call
    over the median of the last three is beyond ``LIMIT``: by chance at most twice in 1,000 runs, the sum of both.

    Args:
        forward: the engine's forward.
        warmed: the batch that ``forward`` was warmed up on.
        fresh: full batches that ``forward`` never saw, and none of them is ``warmed``.
        engine: its name, for the message of a failure.

    Raises:
        InferenceError: the engine declares an impossible time as not inference.
    """
    calls_ms = list(_calls_ms(forward, warmed, fresh, engine))
    number = len(calls_ms)
    if number < _FEWEST:
        reason = f"needs at least {_FEWEST} full batches besides the one for warming up, the data has {len(fresh)}"
        if len(fresh) >= _FEWEST:
            reason = f"needs at least {_FEWEST} batches of shapes that came before, the data has {number}"
        return RepeatCheck(
            fresh_ms=None,
            same_ms=None,
            speedup=None,
            limit=LIMIT,
            suspicious=False,
            num_batches=number,
            reason=reason,
        )
    late_ms = [statistics.median(calls[_EARLY:]) for calls in calls_ms]
    speedup = statistics.median(calls[0] / late for calls, late in zip(calls_ms, late_ms, strict=True))
    chance = _by_chance(calls_ms)
    return RepeatCheck(
        fresh_ms=statistics.median(calls[0] for calls in calls_ms),
        same_ms=statistics.median(late_ms),
        speedup=speedup,
        chance=float(chance),
        limit=LIMIT,
        suspicious=speedup > LIMIT and chance <= _CHANCE,
        num_batches=number,
    )


def _calls_ms(forward: Forward, warmed: InferBatch, fresh: Sequence[InferBatch], engine: str) -> Iterator[list[float]]:
    """Yield the milliseconds of each batch's calls, in their order."""
    met = {_shapes(warmed)}
    for batch in fresh:
        calls = [_timed(forward, batch, engine) for _ in range(_CALLS)]
        spared_s = min(other_s for _, other_s in calls)
        if _shapes(batch) in met:
            yield [max((took_s - spared_s) * 1000, _CLOCK_MS) for took_s, _ in calls]
        met.add(_shapes(batch))


def _timed(forward: Forward, batch: InferBatch, engine: str) -> tuple[float, float]:
    """Return the seconds of a call, and those of them that the engine declares as not inference."""
    for each in batch.inputs:
        each.clone()
    began = time.perf_counter()
    _, other_s = forward(list(batch.inputs))
    took_s = time.perf_counter() - began
    check_declared(other_s, took_s, engine)
    return took_s, other_s


def _shapes(batch: InferBatch) -> tuple[torch.Size, ...]:
    return tuple(each.shape for each in batch.inputs)


def _by_chance(calls_ms: Sequence[Sequence[float]]) -> Fraction:
    """Return how often at most one of the tests comes out so, or more extreme, where calls do not differ."""
    found = []
    for early, share in _SHARES.items():
        slower = sum(_slower(calls, early, LIMIT) for calls in calls_ms)
        found.append(_at_least(slower, early, len(calls_ms)) * _CHANCE / share)
    return min(Fraction(1), *found)


def _slower(calls: Sequence[float], early: int, limit: float) -> int:
    """Count the pairs of an early and a later call in which the early one took over ``limit`` times as long."""
    return sum(one > limit * other for one in calls[:early] for other in calls[early:])


def _at_least(slower: int, early: int, number: int) -> Fraction:
    """Return the probability of ``slower`` pairs or more over ``number`` batches with all orders equally likely."""
    sums = _sums(early, number)
    return Fraction(sum(count for total, count in sums.items() if total >= slower), sum(sums.values()))


@cache
def _sums(early: int, number: int) -> Mapping[int, int]:
    """Return in how many ways the orders of the calls of ``number`` batches give each sum of slower pairs."""
    if number == 0:
        return {0: 1}
    ways = Counter(_slower(order, early, 1.0) for order in permutations(range(_CALLS)))
    sums: Counter[int] = Counter()
    for total, count in _sums(early, number - 1).items():
        for more, each in ways.items():
            sums[total + more] += count * each
    return sums
