"""The schedule keeps its bounds exactly, whatever happens to trials."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.automl.config import ScheduleConfig
from accelmark.automl.records import TrialStatus
from accelmark.automl.search.schedule import Scheduler, stops_early
from accelmark.automl.search.surrogate import predicted_accuracy

ENDS: list[TrialStatus] = ["finished", "finished", "crashed", "lost", "stalled", "out-of-memory"]


def simulated(schedule: ScheduleConfig, seed: int) -> tuple[Scheduler, list[int], int, float]:
    """Run a schedule to its end with trials of random length and fate; return also the starts and the peak."""
    generator = np.random.default_rng(seed)
    scheduler, now, peak = Scheduler(schedule), 0.0, 0
    starts: list[int] = []
    offered = 0
    ends: dict[int, float] = {}
    while not scheduler.over(now):
        for _ in range(scheduler.wanted()):
            scheduler.ready.append(offered)
            offered += 1
        while (assignment := scheduler.start(now)) is not None:
            starts.append(assignment.trial)
            ends[assignment.trial] = now + float(generator.uniform(1, 5))
        peak = max(peak, len(scheduler.running))
        if scheduler.must_cut(now):
            for trial in list(scheduler.running):
                assert not scheduler.ended(trial, "cut", now)
            continue
        trial = min(scheduler.running, key=lambda one: ends[one])
        bound = schedule.max_duration if schedule.max_duration is not None else float("inf")
        if ends[trial] >= bound:
            now = bound
            continue
        now = ends[trial]
        scheduler.ended(trial, ENDS[int(generator.integers(len(ENDS)))], now)
    return scheduler, starts, peak, now


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(0, 10_000))
def test_as_many_trials_start_as_were_asked_and_never_more_at_a_time(
    concurrency: int, trials: int, attempts: int, seed: int
) -> None:
    schedule = ScheduleConfig(concurrency=concurrency, max_trials=trials, max_attempts=attempts)
    _, starts, peak, _ = simulated(schedule, seed)
    assert set(starts) == set(range(trials))
    assert peak == min(concurrency, trials)
    assert max(starts.count(trial) for trial in set(starts)) <= attempts


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.floats(0.5, 60), st.integers(0, 10_000))
def test_no_trial_starts_after_the_time_is_up_and_all_end_then(concurrency: int, max_s: float, seed: int) -> None:
    scheduler, _, _, now = simulated(ScheduleConfig(concurrency=concurrency, max_duration=max_s), seed)
    assert now == max_s
    assert not scheduler.running
    assert scheduler.stop_reason(now) == "time"


def test_epochs_and_tuning_follow_the_round_to_the_end() -> None:
    schedule = ScheduleConfig(concurrency=3, max_trials=99)
    assert [schedule.plan(number) for number in range(1, 6)] == [
        (15, False), (30, False), (45, False), (60, True), (60, True),
    ]  # fmt: skip
    assert ScheduleConfig(max_trials=99, tuning_round=None).plan(30) == (60, False)


@pytest.mark.parametrize(("status", "attempts"), [("crashed", 3), ("diverged", 1)])
def test_a_crashed_trial_is_tried_again_and_one_that_diverged_is_not(status: TrialStatus, attempts: int) -> None:
    scheduler = Scheduler(ScheduleConfig(concurrency=1, max_trials=1, max_attempts=3))
    scheduler.ready.append(0)
    for attempt in range(1, attempts + 1):
        assert scheduler.start(0.0) == (0, 0, attempt)
        assert scheduler.ended(0, status, 1.0) is (attempt < attempts)
    assert scheduler.over(2.0)
    assert scheduler.started_trials == 1


def test_early_stop_waits_its_patience_and_restarts_after_progress() -> None:
    for number, patience in ((1, 8), (4, 14), (7, 20), (30, 20)):
        losses = [1.0, 0.9995, 0.5, *[0.4999] * patience]
        ends = [stops_early(number, losses[:count]) for count in range(1, len(losses) + 1)]
        assert ends == [False] * (len(losses) - 1) + [True]


def test_a_logarithmic_curve_is_extrapolated_and_a_prediction_is_never_below_what_was_seen() -> None:
    true = [0.1 * np.log2(epoch + 2) + 0.2 for epoch in range(1, 61)]
    assert predicted_accuracy(true[:10], 60) == pytest.approx(true[59], abs=0.01)
    assert predicted_accuracy([0.5, 0.6, 0.4], 60) >= 0.6
    assert predicted_accuracy([0.9, 0.95, 0.99, 0.995], 10_000) <= 1
    assert predicted_accuracy([0.3, 0.4], 60) == 0.4
