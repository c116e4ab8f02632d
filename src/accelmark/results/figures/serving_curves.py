"""Curves of a serving round over time, for charts: output tokens per second and requests in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from accelmark.results.figures.serving import counted, outputs_of
from accelmark.results.read.requests import Floats, Requests
from accelmark.results.schema import Point

_NUM_BINS: Final = 300
_MIN_BIN_S: Final = 0.5


class StageRequests(NamedTuple):
    """The requests of one stage, and when it began, in seconds since the first stage did."""

    stage: int
    begin_s: float
    requests: Requests


def load_curves(stages: Sequence[StageRequests]) -> dict[str, tuple[Point, ...]]:
    """Return ``throughput`` (output tokens/s) and ``requests_in_progress``; ``step`` is the number of the stage."""
    stages = [stage for stage in stages if len(stage.requests)]
    if not stages:
        return {}
    end_s = max(stage.begin_s + float(stage.requests.end_s.max()) for stage in stages)
    num_bins = max(min(_NUM_BINS, int(end_s / _MIN_BIN_S)), 1)
    edges = np.linspace(0.0, max(end_s, _MIN_BIN_S), num_bins + 1)
    tokens = np.zeros(num_bins)
    busy_s = np.zeros(num_bins)
    for _, begin_s, requests in stages:
        outputs = outputs_of(counted(requests))
        tokens += np.histogram(begin_s + outputs.arrival_s, bins=edges, weights=outputs.tokens)[0]
        busy_s += _covered(begin_s + requests.due_s, begin_s + requests.end_s, edges)
    width_s = edges[1] - edges[0]
    middles = (edges[:-1] + edges[1:]) / 2
    numbers = np.searchsorted([stage.begin_s for stage in stages], middles, side="right") - 1
    names = [stages[max(number, 0)].stage for number in numbers.tolist()]
    return {
        "throughput": _points(names, middles, tokens / width_s),
        "requests_in_progress": _points(names, middles, busy_s / width_s),
    }


def _covered(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return how long intervals cover each bin: differences of the time covered up to each edge."""
    begins, ends = np.sort(begins), np.sort(ends)
    sums = (np.concatenate(([0.0], np.cumsum(times))) for times in (begins, ends))
    before = []
    for times, summed in zip((begins, ends), sums, strict=True):
        number = np.searchsorted(times, edges, side="right")
        before.append(number * edges - summed[number])
    covered: Floats = np.diff(before[0] - before[1])
    return covered


def _points(stages: Sequence[int], times: Floats, values: Floats) -> tuple[Point, ...]:
    return tuple(
        Point(step=stage, time_s=round(time, 3), value=float(f"{value:.5g}"))
        for stage, time, value in zip(stages, times.tolist(), values.tolist(), strict=True)
    )
