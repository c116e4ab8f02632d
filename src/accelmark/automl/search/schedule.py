"""The schedule of a search as a pure state machine without clock, process or network."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Literal, NamedTuple

from accelmark.automl.config import ScheduleConfig
from accelmark.automl.records import RETRIED, Individual, TrialRecord, TrialStatus

_LOOKAHEAD: Final = 0.125
"""Networks to prepare in advance, as a share of the concurrent trials (at least one)."""
_MIN_DELTA: Final = 1e-3

StopReason = Literal["trials", "time", "asked", "exhausted", "spent"]


class Assignment(NamedTuple):
    """A trial that starts now."""

    trial: int
    individual: int
    attempt: int = 1


@dataclass
class Scheduler:
    """Prepared networks (``ready``), running trials and retries. Times are seconds on the run's clock."""

    schedule: ScheduleConfig
    ready: deque[int] = field(default_factory=deque)
    running: dict[int, Assignment] = field(default_factory=dict)
    retries: deque[Assignment] = field(default_factory=deque)
    started_trials: int = 0
    asked_to_stop: bool = False
    exhausted: bool = False
    is_last: bool = False
    """Only last trainings start: the operations, the time or the networks of the search are used up."""
    spent: bool = False
    """No last training is left to start."""

    @staticmethod
    def resumed(schedule: ScheduleConfig, trials: Collection[TrialRecord], individuals: list[Individual]) -> Scheduler:
        """Return the scheduler of a search with these latest attempts; trials that were running are tried again."""
        scheduler = Scheduler(schedule, started_trials=len(trials))
        for record in trials:
            retried = record.status in RETRIED and record.attempt < schedule.max_attempts
            if record.status == "running" or retried:
                scheduler.retries.append(Assignment(record.trial, record.individual, record.attempt + 1))
        started = {record.individual for record in trials}
        scheduler.ready.extend(one.id for one in individuals if one.status == "pending" and one.id not in started)
        return scheduler

    def wanted(self) -> int:
        """Return how many more networks to prepare."""
        schedule = self.schedule
        if self.asked_to_stop or self.exhausted or self.is_last:
            return 0
        target = schedule.concurrency - len(self.running) + max(1, ceil(schedule.concurrency * _LOOKAHEAD))
        if schedule.max_trials is not None:
            target = min(target, schedule.max_trials - self.started_trials)
        return max(0, target - len(self.ready))

    def start(self, now_s: float) -> Assignment | None:
        """Return the trial that starts now; None where none may start or no network is ready."""
        if self.must_cut(now_s) or len(self.running) >= self.schedule.concurrency:
            return None
        if self.retries:
            assignment = self.retries.popleft()
        elif self.ready and not self._all_started():
            assignment = Assignment(self.started_trials, self.ready.popleft())
            self.started_trials += 1
        else:
            return None
        self.running[assignment.trial] = assignment
        return assignment

    def ended(self, trial: int, status: TrialStatus, now_s: float) -> bool:
        """Record the end of a trial; return whether it will be tried again."""
        old = self.running.pop(trial)
        if status not in RETRIED or self.must_cut(now_s) or old.attempt >= self.schedule.max_attempts:
            return False
        self.retries.append(old._replace(attempt=old.attempt + 1))
        return True

    def stop_reason(self, now_s: float) -> StopReason | None:
        """Return why no further trial will start, or None."""
        if self.asked_to_stop:
            return "asked"
        if self.remaining_s(now_s) == 0:
            return "time"
        if self.retries:
            return None
        if self._all_started():
            return "trials"
        if self.ready:
            return None
        if self.exhausted and self.schedule.final_share is None:
            return "exhausted"
        return "spent" if self.spent else None

    def must_cut(self, now_s: float) -> bool:
        """Return whether running trials must be cut."""
        return self.stop_reason(now_s) in ("time", "asked")

    def over(self, now_s: float) -> bool:
        """Return whether nothing runs and nothing will start."""
        return not self.running and self.stop_reason(now_s) is not None

    def remaining_s(self, now_s: float) -> float | None:
        """Return the remaining seconds; None where unbounded."""
        limit_s = self.schedule.max_duration
        return None if limit_s is None else max(0.0, limit_s - now_s)

    def _all_started(self) -> bool:
        return self.schedule.max_trials is not None and self.started_trials >= self.schedule.max_trials


def stops_early(number: int, losses: Sequence[float]) -> bool:
    """Return whether a trial of round ``number`` ends after these validation losses, by AIPerf's early stop."""
    best, waited = float("inf"), 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best - _MIN_DELTA else (best, waited + 1)
    return waited >= min(6 + 2 * number, 20)
