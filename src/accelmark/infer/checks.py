"""Checks of an engine: its answers against the framework's, and whether known items are faster than new ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, reduce
from itertools import permutations
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelmark.spec.backports import zip_strict
from accelmark.spec.log.inference import AnswerCheck, RepeatCheck
from accelmark.tasks.metrics import IGNORED

_FOLLOWED: Final = (128, 1024)
"""Smallest and largest number of items for which the framework also answers the unchanged input."""
_FOLLOWED_ERROR: Final = 0.05
"""Standard error of the sensitivity that is small enough between the two."""

REPEAT_LIMIT: Final = 1.1
"""Ratio of first to repeated calls above which outputs seem to be cached."""
REPEAT_CALLS: Final = 5
_RESOLUTION_MS: Final = 0.05
"""Time of a call that repetition may save without a cache of outputs: an honest model of 0.04 ms a call was reported to
repeat 1.9 times as fast, by the processor's own caches. Not measured on further models."""
_MIN_BATCHES: Final = 4
_FALSE_ALARMS: Final = Fraction(2, 1000)
"""Maximum probability of a false alarm, independent of other load."""
_LEVELS: Final = {1: Fraction(16, 10000), 2: Fraction(4, 10000)}
"""Significance level of each test: the first call against the others, the first two against the others."""


@final
class Answers:
    """The comparison of all answers so far.

    ``iterative``: integers are the choices of an answer's steps, which count as ranked values; the answers of the
    framework follow from the choices before each step (``IterativeModel``).
    """

    def __init__(self, *, iterative: bool = False) -> None:
        self.iterative = iterative
        self.errors: list[Tensor] = []
        self.agreeing = 0
        self.ranked = 0
        self.followed = 0
        self._moves: list[Tensor] = []
        """Rows of two numbers: how far answers moved with their inputs, and how far the framework's did."""

    @property
    def needs_unchanged(self) -> bool:
        """Whether answers for unchanged inputs are still needed."""
        fewest, most = _FOLLOWED
        return self.followed < fewest or (self.followed < most and not self._sensitivity()[1] <= _FOLLOWED_ERROR)

    def add(self, outputs: Sequence[Tensor], expected: Sequence[Tensor], unchanged: Sequence[Tensor] = ()) -> None:
        """Compare the outputs of some items; ``unchanged`` are the framework's for inputs before their perturbation."""
        items = expected[0].shape[0]
        worst = torch.zeros(items)
        for index, (actual, reference) in enumerate(zip_strict(outputs, expected)):
            if self.iterative and not reference.is_floating_point():
                counted = reference != IGNORED
                self.agreeing += int((counted & (actual == reference)).sum())
                self.ranked += int(counted.sum())
                continue
            if not reference.is_floating_point():
                worst = worst.maximum((actual != reference).reshape(items, -1).any(1).float())
                continue
            one, two = actual.float().reshape(items, -1), reference.float().reshape(items, -1)
            worst = worst.maximum((one - two).norm(dim=1) / two.norm(dim=1).clamp_min(1e-12))
            if index == 0 and reference.ndim > 1 and reference.shape[-1] > 1:
                self.agreeing += int((actual.argmax(-1) == reference.argmax(-1)).sum())
                self.ranked += reference[..., 0].numel()
            if unchanged:
                before = unchanged[index].float().reshape(items, -1)
                moved, expected_move = (one - before) * (two - before), (two - before).square()
                self._moves.append(torch.stack([moved.sum(1), expected_move.sum(1)], 1).double())
        self.followed += items if unchanged else 0
        self.errors.append(worst.nan_to_num(math.inf, math.inf))

    def _sensitivity(self) -> tuple[float, float]:
        """Return the ratio of the sums of both columns of moves, and its standard error; NaN where nothing moved."""
        moved, expected = torch.cat(self._moves).unbind(1) if self._moves else (torch.zeros(1), torch.zeros(1))
        total = float(expected.sum())
        if not total > 0:
            return math.nan, math.nan
        ratio = float(moved.sum()) / total
        return ratio, float((moved - ratio * expected).norm()) / total

    def result(self, **others: Any) -> AnswerCheck:
        """Return the comparison as an event."""
        errors = torch.cat(self.errors) if self.errors else torch.zeros(0)
        return AnswerCheck(
            num_items=len(errors),
            median_error=_finite(errors.median().item()) if len(errors) else None,
            worst_error=_finite(errors.max().item()) if len(errors) else None,
            top1_agreement=self.agreeing / self.ranked if self.ranked else None,
            sensitivity=_finite(self._sensitivity()[0]),
            **others,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def repeat_check(calls_ms: Sequence[Sequence[float]]) -> RepeatCheck:
    """Compare the time of each batch's first computation with its repetitions, to detect a cache.

    Modelled on MLPerf's compliance test TEST04, including its limit of 10 %. ``calls_ms`` has ``REPEAT_CALLS``
    durations of each batch, in their order and by the rank's clock.

    In each batch every early call is compared with every later one and counts as slower when it took over
    ``REPEAT_LIMIT`` times as long; the counts are added over all batches. Without a cache each order of a batch's calls
    is equally likely, which gives the exact distribution of the sum (a one-sided Mann-Whitney test, stratified by
    batch). Two tests are made:

    * the first call against the other four, at 0.0016: detects a cache that answers from the second call on;
    * the first two calls against the other three, at 0.0004: detects a cache that stores items at their second call.

    An engine is suspicious when one of them is significant and the median over batches of the first call over the
    median of the last three is above ``REPEAT_LIMIT``, and that saves more than the processor's own caches do: a false
    alarm in at most 2 of 1,000 runs.
    """
    number = len(calls_ms)
    if number < _MIN_BATCHES:
        return RepeatCheck(
            fresh_ms=None, same_ms=None, speedup=None, limit=REPEAT_LIMIT, suspicious=False, num_batches=number,
            reason=f"needs at least {_MIN_BATCHES} batches, {number} were computed again",
        )  # fmt: skip
    late_ms = [statistics.median(calls[2:]) for calls in calls_ms]
    speedup = statistics.median(calls[0] / late for calls, late in zip_strict(calls_ms, late_ms))
    # An upper bound of the probability that either test is as extreme as this without a cache.
    chance = Fraction(1)
    for early, level in _LEVELS.items():
        slower = sum(_count_slower(calls, early, REPEAT_LIMIT) for calls in calls_ms)
        orders = _orders_by_sum(early, number)
        chance = min(chance, Fraction(orders[slower:].sum(), orders.sum()) * _FALSE_ALARMS / level)
    fresh_ms, same_ms = statistics.median(calls[0] for calls in calls_ms), statistics.median(late_ms)
    return RepeatCheck(
        fresh_ms=fresh_ms,
        same_ms=same_ms,
        speedup=speedup,
        chance=float(chance),
        limit=REPEAT_LIMIT,
        suspicious=speedup > REPEAT_LIMIT and chance <= _FALSE_ALARMS and fresh_ms - same_ms > _RESOLUTION_MS,
        reason=f"a call takes {fresh_ms:.3f} ms, which is too short" if fresh_ms <= _RESOLUTION_MS else None,
        num_batches=number,
    )


def _count_slower(calls: Sequence[float], early: int, limit: float) -> int:
    """Count the pairs of an early and a later call in which the early one took over ``limit`` times as long."""
    return sum(one > limit * other for one in calls[:early] for other in calls[early:])


@cache
def _orders_by_sum(early: int, number: int) -> npt.NDArray[np.object_]:
    """Return the number of orders of the calls of ``number`` batches for each sum of slower pairs, from 0 on."""
    sums = [_count_slower(order, early, 1.0) for order in permutations(range(REPEAT_CALLS))]
    ways: npt.NDArray[np.object_] = np.bincount(sums).astype(object)  # Python's integers, which are exact
    return reduce(np.convolve, [ways] * number)
