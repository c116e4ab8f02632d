"""Looking for a cache: the same items again must not run suspiciously faster than fresh ones.

The idea is that of MLPerf's compliance test TEST04; the limit of 10 % is the one its rules state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

from accelmark.infer.case import InferBatch
from accelmark.infer.measure import Forward
from accelmark.spec.infer_events import RepeatCheck

LIMIT: Final = 1.1
"""Fresh over same beyond which outputs seem to be cached."""
_FEWEST: Final = 4
_TRIES: Final = 3


def repeat_check(forward: Forward, fresh: Sequence[InferBatch]) -> RepeatCheck:
    """Time batches never seen before against one of them over and over.

    Blocks of fresh batches and of the same one take turns, so that a machine growing busy meets both; a suspicion has
    to come up three times to stand, each time on batches that were not seen before.

    Args:
        forward: the engine's forward, warmed up on a batch that is not among ``fresh``.
        fresh: distinct full batches.
    """
    if len(fresh) < _FEWEST:
        reason = f"needs at least {_FEWEST} full batches besides the one for warming up, the data has {len(fresh)}"
        return _none(len(fresh), reason)
    check = _none(len(fresh), "")
    for batches in _groups(fresh):
        same = batches[0]
        half = len(batches) // 2
        fresh_ms, same_ms = [], []
        for block in (batches[:half], batches[half:]):
            fresh_ms += [_timed(forward, batch) for batch in block]
            same_ms += [_timed(forward, same) for _ in block]
        # The median of the same batch leaves out its own first, honest call.
        fresh_median, same_median = statistics.median(fresh_ms), statistics.median(same_ms)
        speedup = fresh_median / same_median
        check = RepeatCheck(
            fresh_ms=fresh_median,
            same_ms=same_median,
            speedup=speedup,
            limit=LIMIT,
            suspicious=speedup > LIMIT,
            num_batches=len(batches),
        )
        if not check.suspicious:
            break
    return check


def _none(num_batches: int, reason: str) -> RepeatCheck:
    return RepeatCheck(
        fresh_ms=None,
        same_ms=None,
        speedup=None,
        limit=LIMIT,
        suspicious=False,
        num_batches=num_batches,
        reason=reason,
    )


def _timed(forward: Forward, batch: InferBatch) -> float:
    began = time.perf_counter()
    _, other_s = forward(list(batch.inputs))
    return (time.perf_counter() - began - other_s) * 1000


def _groups(fresh: Sequence[InferBatch]) -> list[list[InferBatch]]:
    """Return the batches of each try: parts of the data where it is enough, else the same items in other company.

    Too few batches of a single item allow one try only, since nothing in them can be rearranged.
    """
    if len(fresh) >= _TRIES * _FEWEST:
        return [list(fresh[start::_TRIES]) for start in range(_TRIES)]
    if fresh[0].num_items == 1:
        return [list(fresh)]
    return [[_rolled(batch, shift) for batch in fresh] for shift in range(min(_TRIES, fresh[0].num_items))]


def _rolled(batch: InferBatch, shift: int) -> InferBatch:
    return InferBatch(tuple(each.roll(shift, 0) for each in batch.inputs), batch.labels)
