"""Compare the pace of training outside of replayed pairs of checkpoints with that within them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from accelmark.results.figures.timeline import Timeline
from accelmark.results.read.reevaluation import SavedCheckpoints
from accelmark.results.schema import Finding, finding
from accelmark.spec.number_format import limit_percent, percent

MAX_FASTER: Final = 0.1
"""Share of a step's time by which steps outside of all pairs may be faster than those of the fastest pair."""
_RULE: Final = "replayed-pace"


def pace_findings(timeline: Timeline, saved: SavedCheckpoints) -> Iterator[Finding]:
    """Report how many steps are outside of all pairs of checkpoints, and whether they are faster than those in pairs.

    A vendor's code can see when a pair is in progress, and leave out work where none is. The mean of the steps outside
    is compared with the median of the windows of each pair, so that interruptions raise no alarm. The pair from the
    initial weights is not compared, as the first steps are slower.
    """
    if saved.hashes is None:
        return
    last, lengths, wall_s = (timeline.windows[name] for name in ("steps", "lengths", "wall_s"))
    outside, paces = np.ones(len(last), dtype=bool), []
    for start, end in saved.hashes.pairs:
        inside = (last > saved.steps.get(start or "", 0)) & (last <= saved.steps.get(end, 0))
        outside &= ~inside
        if start is not None and inside.any():
            paces.append(float(np.median(wall_s[inside] / lengths[inside])))
    if not paces or not outside.any():
        return
    share = float(lengths[outside].sum() / lengths.sum())
    actual = f"{percent(share)} of the steps are in no pair: they cannot be replayed, and weights that vendor code "
    yield finding("warning", "replay", "every step in a pair of checkpoints", f"{actual}replaced there are not noticed")
    faster = 1 - float(wall_s[outside].sum() / lengths[outside].sum()) / min(paces)
    if faster > MAX_FASTER:
        expected = f"at most {limit_percent(MAX_FASTER)} faster than those of the fastest pair of checkpoints"
        actual = f"steps outside of all pairs, which cannot be replayed, took {percent(faster)} less time"
        yield finding("open", _RULE, expected, f"{actual}: work was left out, or the machine was busy in the pairs")
