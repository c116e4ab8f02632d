"""Looking for a cache: the same items again must not run suspiciously faster than fresh ones.

The idea is that of MLPerf's compliance test TEST04; the limit of 10 % is the one its rules state.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from accelmark.infer.case import InferBatch
from accelmark.infer.measure import Forward
from accelmark.spec.infer_events import RepeatCheck

LIMIT: Final = 1.1
"""Fresh over same beyond which outputs seem to be cached."""
_FEWEST: Final = 4
_AGAIN: Final = 4
_CHANCE: Final = 0.002
"""How often an honest engine may be suspected, on a machine however busy."""
_CLOCK_MS: Final = 1e-6
"""What a call takes at least, so that one answered at once can be divided by."""


def repeat_check(forward: Forward, warmed: InferBatch, fresh: Sequence[InferBatch]) -> RepeatCheck:
    """Time every batch as it comes for the first time, and against itself as it comes again.

    An honest engine may find the same items faster too, for reasons that are not a cache of outputs; they are kept out.
    A batch is compared with itself, since items may differ in work; its memory is read before each call, since a batch
    out of main memory cost small models a fifth; a shape that did not come before is not counted, since engines prepare
    for shapes.

    Nor is a busy machine a suspicion. Where nothing but disturbance tells the calls of a batch apart, the first is the
    slowest of five in one batch of five; beyond the limit slower than each of the others has to be so many batches
    that this happens by chance in less than 2 runs of 1,000 (a permutation test, one-sided: 4 batches of 4, 8 of 12).

    Args:
        forward: the engine's forward.
        warmed: the batch that ``forward`` was warmed up on.
        fresh: full batches that ``forward`` never saw, and none of them is ``warmed``.
    """
    calls_ms = list(_calls_ms(forward, warmed, fresh))
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
    speedup = statistics.median(first / statistics.median(again) for first, *again in calls_ms)
    num_faster = sum(first > LIMIT * max(again) for first, *again in calls_ms)
    return RepeatCheck(
        fresh_ms=statistics.median(first for first, *_ in calls_ms),
        same_ms=statistics.median(statistics.median(again) for _, *again in calls_ms),
        speedup=speedup,
        num_faster=num_faster,
        limit=LIMIT,
        suspicious=speedup > LIMIT and _by_chance(num_faster, number) < _CHANCE,
        num_batches=number,
    )


def _calls_ms(forward: Forward, warmed: InferBatch, fresh: Sequence[InferBatch]) -> Iterator[list[float]]:
    """Yield the milliseconds of each batch's first call and of its further ones."""
    met = {_shapes(warmed)}
    for batch in fresh:
        calls = [_timed(forward, batch) for _ in range(1 + _AGAIN)]
        if _shapes(batch) in met:
            yield calls
        met.add(_shapes(batch))


def _timed(forward: Forward, batch: InferBatch) -> float:
    for each in batch.inputs:
        each.clone()
    began = time.perf_counter()
    _, other_s = forward(list(batch.inputs))
    return max((time.perf_counter() - began - other_s) * 1000, _CLOCK_MS)


def _shapes(batch: InferBatch) -> tuple[torch.Size, ...]:
    return tuple(each.shape for each in batch.inputs)


def _by_chance(num_faster: int, number: int) -> float:
    """Return how often so many batches or more have their slowest call first where calls do not differ."""
    slowest_first = 1 / (1 + _AGAIN)
    return sum(
        math.comb(number, count) * slowest_first**count * (1 - slowest_first) ** (number - count)
        for count in range(num_faster, number + 1)
    )
