"""Merge the logs of all ranks of a round into one timeline, and find its warm-up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from accelmark.results.read.rank_log import Attempt, EventTimes, OwnTime, RankEnd, TrainLog, read_train_log
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


class TimedEvaluation(NamedTuple):
    """An evaluation of the lead rank and the raw training time at its end."""

    time_s: float
    evaluation: Evaluation


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
    evaluations: tuple[TimedEvaluation, ...]
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
        spans.setdefault(
            str(path.parent),
            tuple((start / 1e3, (start + train_ms) / 1e3) for start, train_ms in begun_ms if start is not None),
        )
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
        "steps": [np.asarray(attempt.window_steps) for attempt, _, _ in begun],
        "samples": [np.asarray(attempt.window_samples) for attempt, _, _ in begun],
        "time_s": [(np.asarray(attempt.window_ms) - start + before) / 1e3 for attempt, start, before in begun],
        "wall_s": [np.asarray(attempt.window_wall_ms) / 1e3 for attempt, _, _ in begun],
        "lengths": [np.asarray(attempt.window_lengths) for attempt, _, _ in begun],
    }
    windows = {name: np.concatenate([np.zeros(0), *parts]) for name, parts in columns.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_losses = loss_sums / num_losses
    nonfinite = np.flatnonzero(~np.isfinite(loss_sums))
    evaluations = tuple(
        TimedEvaluation((at_ms - start_ms + before) / 1e3, evaluation)
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
