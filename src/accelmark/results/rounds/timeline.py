"""Merge the logs of all ranks of a round into one timeline; its warm-up, its curves and its histogram for charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from accelmark.results.read.rank_log import Attempt, EventTimes, OwnTime, RankEnd, TrainLog, read_train_log
from accelmark.results.schema import Point
from accelmark.spec.backports import zip_strict
from accelmark.spec.log.events import Evaluation

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]
Column = Union[Sequence[float], Floats]


_SETTLED: Final = 1.25
"""Mean time of the steps after warm-up, as a multiple of the median step of the second half."""
_STEPS_SETTLED: Final = 5
_LARGEST_PART: Final = 3


class WarmUp(NamedTuple):
    """The first steps of a process, which compile, search kernels and open libraries."""

    num_steps: int
    time_s: float
    """Of these steps, with their waits for data."""
    is_bounded: bool
    """Whether the bound, and not the time of the steps, ended it."""


def warm_up(step_ms: Floats) -> WarmUp:
    """Return the warm-up of a process by the times of all of its steps.

    It ends before the first five steps whose mean is at most 1.25 times the median step of the second half, and after a
    third of the steps.
    """
    most = len(step_ms) // _LARGEST_PART
    if not most:
        return WarmUp(0, 0.0, is_bounded=False)
    length = min(_STEPS_SETTLED, len(step_ms) - most)
    means = np.convolve(step_ms, np.full(length, 1 / length), mode="valid")[: most + 1]
    settled = np.flatnonzero(means <= _SETTLED * np.median(step_ms[len(step_ms) // 2 :]))
    count = int(settled[0]) if len(settled) else most
    return WarmUp(count, float(step_ms[:count].sum()) / 1e3, is_bounded=not len(settled))


class Timeline(NamedTuple):
    """One round over all its ranks; job-wide times come from the lead rank.

    The lead is the lowest rank whose log has windows of steps, else the lowest rank with a log.
    """

    lead: TrainLog
    ranks: tuple[RankEnd, ...]
    e2e_s: float
    """From the start of the process to its last event, summed over attempts."""
    init_s: float | None
    """From the start of the process to TRAIN_START, summed over attempts; None if training never started."""
    train_s: float
    """Raw training time, summed over attempts."""
    eval_s: float
    attempts: tuple[Attempt, ...]
    """Of the lead rank, those that began to train."""
    warm_ups: tuple[WarmUp, ...]
    """Of each of these attempts."""
    compute_s: float
    """Computation of all steps on the slowest rank."""
    data_wait_s: float
    """Time waiting for data, mean over ranks."""
    num_steps: int
    num_samples: int
    evaluations: tuple[tuple[float, Evaluation], ...]
    """Of the lead rank, with the raw training time at their end."""
    step_ms: Floats
    """Every step of every rank, unsorted."""
    losses: Floats
    """Loss by optimizer step (entry 0 is step 1), mean over ranks; NaN where any is not finite or missing."""
    nonfinite_step: int | None
    """The first step at which a rank's loss was not finite."""
    windows: dict[str, Floats]
    """Windows of the lead rank: optimizer ``steps`` and ``samples`` done and raw training time (``time_s``) at the end
    of each, its duration (``wall_s``) and its number of steps (``lengths``).
    """
    train_spans: dict[str, tuple[tuple[float, float], ...]]
    """Node directory -> (begin, end) of raw training of each attempt, in seconds of that host's monotonic clock."""
    times: dict[str, EventTimes]
    """Node directory -> the times of the events of its first rank, in its last attempt."""
    own: dict[int, OwnTime]
    """Rank -> the time of its own part of steps; without ranks that did not log it."""

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last step over ranks; None where it is not finite or nothing was trained."""
        last = float(self.losses[-1]) if len(self.losses) else math.nan
        return last if last == last else None


def read_timeline(logs: Iterable[tuple[int, Path]]) -> Timeline | None:
    """Merge the logs of all ranks, given as (global rank, path); None where no log has an event."""
    lead: TrainLog | None = None
    ends: list[RankEnd] = []
    step_ms: list[Floats] = []
    spans: dict[str, tuple[tuple[float, float], ...]] = {}
    times: dict[str, EventTimes] = {}
    own: dict[int, OwnTime] = {}
    compute_ms = data_wait_ms = 0.0
    loss_sums = num_losses = np.zeros(0)
    for rank, path in sorted(logs):
        log = read_train_log(path, rank)
        if not log.attempts:
            continue
        if lead is None or (log.has_windows and not lead.has_windows):
            lead = log
            spans.pop(str(path.parent), None)
        ends.append(log.end)
        step_ms.append(np.frombuffer(log.step_ms, dtype=np.float32))
        compute_ms = max(compute_ms, log.compute_ms)
        data_wait_ms += log.data_wait_ms
        begun_ms = [(attempt.train_start_ms, attempt.train_ms) for attempt in log.attempts]
        begun_s = ((start / 1e3, (start + train_ms) / 1e3) for start, train_ms in begun_ms if start is not None)
        spans.setdefault(str(path.parent), tuple(begun_s))
        times.setdefault(str(path.parent), log.attempts[-1].times)
        if log.own.num_steps:
            own[rank] = log.own
        steps = np.fromiter((step - 1 for attempt in log.attempts for step in attempt.loss_steps()), dtype=np.int64)
        losses = np.concatenate([np.asarray(attempt.losses) for attempt in log.attempts])
        size = max(len(loss_sums), int(steps.max(initial=-1)) + 1)
        of_rank, seen = np.zeros(size), np.zeros(size)
        of_rank[steps[steps >= 0]] = losses[steps >= 0]
        seen[steps[steps >= 0]] = 1
        loss_sums = np.pad(loss_sums, (0, size - len(loss_sums))) + of_rank
        num_losses = np.pad(num_losses, (0, size - len(num_losses))) + seen
    if lead is None:
        return None
    begun: list[tuple[Attempt, float, float]] = []  # with the times of TRAIN_START and of raw training before
    before_ms = 0.0
    for attempt in lead.attempts:
        if attempt.train_start_ms is not None:
            begun.append((attempt, attempt.train_start_ms, before_ms))
            before_ms += attempt.train_ms
    columns: dict[str, list[Floats]] = {
        "steps": [np.asarray(attempt.windows.steps) for attempt, _, _ in begun],
        "samples": [np.asarray(attempt.windows.samples) for attempt, _, _ in begun],
        "time_s": [(np.asarray(attempt.windows.end_ms) - start + before) / 1e3 for attempt, start, before in begun],
        "wall_s": [np.asarray(attempt.windows.wall_ms) / 1e3 for attempt, _, _ in begun],
        "lengths": [np.asarray(attempt.windows.lengths) for attempt, _, _ in begun],
    }
    windows = {name: np.concatenate([np.zeros(0), *parts]) for name, parts in columns.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_losses = loss_sums / num_losses
    nonfinite = np.flatnonzero(~np.isfinite(loss_sums))
    evaluations = tuple(
        ((at_ms - start_ms + before) / 1e3, evaluation)
        for attempt, start_ms, before in begun
        for at_ms, evaluation in attempt.evaluations
    )
    return Timeline(
        lead=lead,
        ranks=tuple(ends),
        attempts=tuple(attempt for attempt, _, _ in begun),
        evaluations=evaluations,
        e2e_s=sum(attempt.last_ms - attempt.begin_ms for attempt in lead.attempts) / 1e3,
        init_s=sum(start_ms - attempt.begin_ms for attempt, start_ms, _ in begun) / 1e3 if begun else None,
        train_s=sum(attempt.train_ms for attempt, _, _ in begun) / 1e3,
        eval_s=sum(attempt.eval_s for attempt, _, _ in begun),
        warm_ups=tuple(warm_up(np.asarray(attempt.step_ms, dtype=np.float64)) for attempt, _, _ in begun),
        compute_s=compute_ms / 1e3,
        data_wait_s=data_wait_ms / 1e3 / len(ends),
        num_steps=int(windows["steps"][-1:].sum()),
        num_samples=int(windows["samples"][-1:].sum()),
        step_ms=np.concatenate(step_ms),
        losses=mean_losses,
        nonfinite_step=int(nonfinite[0]) + 1 if len(nonfinite) else None,
        windows=windows,
        train_spans=spans,
        times=times,
        own=own,
    )


MAX_POINTS: Final = 1000
HISTOGRAM_BINS: Final = 60


def thin(values: Floats, limit: int = MAX_POINTS) -> Indices:
    """Return increasing indices of at most ``limit`` points, with the minimum and maximum of each interval."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(1, count - 1, max((limit - 2) // 2, 1) + 1).astype(np.int64)
    low, high = edges[:-1], edges[1:]
    kept = [0, count - 1]
    lowest = np.where(np.isfinite(values), values, np.inf)
    highest = np.where(np.isfinite(values), values, -np.inf)
    for begin, end in zip_strict(low.tolist(), high.tolist()):
        if end > begin:
            kept.append(begin + int(lowest[begin:end].argmin()))
            kept.append(begin + int(highest[begin:end].argmax()))
    return np.unique(np.asarray(kept))


def curves_of(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> dict[str, tuple[Point, ...]]:
    """Return the curves ``loss``, ``throughput`` (units/s of each window) and each metric, over steps and time."""
    curves: dict[str, tuple[Point, ...]] = {}
    ends, times = timeline.windows["steps"], timeline.windows["time_s"]
    steps = np.arange(1, len(timeline.losses) + 1)
    if len(steps) and len(ends):
        loss_times = np.interp(steps, np.append(0.0, ends), np.append(0.0, times))
        curves["loss"] = _points(steps, loss_times, timeline.losses)
    if len(ends):
        trained, wall_s = np.diff(timeline.windows["samples"], prepend=0.0), timeline.windows["wall_s"]
        by_steps = timeline.windows["lengths"] * samples_per_step  # for the first window after a restart
        units = np.where((trained <= 0) | (trained > by_steps), by_steps, trained) * units_per_sample
        with np.errstate(divide="ignore", invalid="ignore"):
            curves["throughput"] = _points(ends, times, np.where(wall_s > 0, units / wall_s, np.nan))
    for time_s, evaluation in timeline.evaluations:
        for name, value in evaluation.metrics.items():
            point = Point(step=evaluation.global_steps, time_s=round(time_s, 4), value=value)
            curves[name] = (*curves.get(name, ()), point)
    return curves


def _points(steps: Floats | Indices, times: Floats, values: Floats) -> tuple[Point, ...]:
    kept = thin(values)
    rows = zip_strict(steps[kept], times[kept].tolist(), values[kept].tolist())
    return tuple(Point(step=int(step), time_s=round(time, 4), value=rounded(value)) for step, time, value in rows)


def rounded(value: float, digits: int = 7) -> float | None:
    """Return a value with as many significant digits as a chart shows; None where it is not finite."""
    return float(f"{value:.{digits}g}") if value - value == 0 else None


def histogram(step_ms: Floats) -> tuple[tuple[float, int], ...]:
    """Return (upper edge in ms, number of steps) of bins of equal width up to p99.5, and one bin to the slowest step.

    The first entry has the lower edge of the first bin and 0 steps. The number of bins follows Rice's rule.
    """
    if not len(step_ms):
        return ()
    low, high, slowest = float(step_ms.min()), float(np.quantile(step_ms, 0.995)), float(step_ms.max())
    if high <= low:
        return ((low, 0), (slowest, len(step_ms)))
    edges = np.linspace(low, high, min(HISTOGRAM_BINS, max(8, round(2 * len(step_ms) ** (1 / 3)))) + 1)
    if slowest > high:
        edges = np.append(edges, slowest)
    counts, _ = np.histogram(step_ms, bins=edges.astype(np.float64))
    counts[-1] += len(step_ms) - int(counts.sum())
    return ((round(low, 4), 0), *((round(float(edge), 4), int(n)) for edge, n in zip_strict(edges[1:], counts)))
