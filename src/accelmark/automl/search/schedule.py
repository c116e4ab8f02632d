"""The schedule of a search as a pure state machine without clock, process or network."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final, Literal, final

from accelmark.automl.records import RETRIED, TrialStatus

AIPERF_ROUND_EPOCHS: Final = (15, 30, 45, 60)
AIPERF_TUNING_ROUND: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """How a search is scheduled.

    concurrency   trials at a time (AIPerf's trialConcurrency)
    max_trials    trials to start, retries not counted; None: unbounded
    max_s         seconds on the run's clock after which running trials are cut; None: unbounded
    round_epochs  epochs of a trial of the first, second ... round; the last entry is for all later rounds
    tuning_round  first round in which hyperparameters are searched; None: never
    max_attempts  attempts of a trial that fails
    lookahead     networks to prepare in advance, as a share of ``concurrency`` (at least one)
    """

    concurrency: int
    max_trials: int | None = None
    max_s: float | None = None
    round_epochs: tuple[int, ...] = AIPERF_ROUND_EPOCHS
    tuning_round: int | None = AIPERF_TUNING_ROUND
    max_attempts: int = 2
    lookahead: float = 0.125

    def round_of(self, trial: int) -> int:
        """Return the round of a trial (numbered from 0); a round is ``concurrency`` trials."""
        return trial // self.concurrency + 1

    def epochs_of(self, trial: int) -> int:
        """Return the epochs of a trial."""
        return self.round_epochs[min(self.round_of(trial), len(self.round_epochs)) - 1]

    def tunes(self, trial: int) -> bool:
        """Return whether the trial's hyperparameters are searched."""
        return self.tuning_round is not None and self.round_of(trial) >= self.tuning_round


@final
@dataclass(frozen=True, slots=True)
class Assignment:
    """A trial that starts now."""

    trial: int
    individual: int
    round: int
    epochs: int
    attempt: int
    tuned: bool


StopReason = Literal["trials", "time", "asked", "exhausted"]


@dataclass
class Scheduler:
    """Ready networks, running trials and retries. Times are seconds on the run's clock."""

    schedule: Schedule
    ready: deque[int] = field(default_factory=deque)
    running: dict[int, Assignment] = field(default_factory=dict)
    retries: deque[Assignment] = field(default_factory=deque)
    started_trials: int = 0
    finished_trials: int = 0
    asked_to_stop: bool = False
    exhausted: bool = False

    def wanted(self, in_preparation: int = 0) -> int:
        """Return how many more networks to prepare."""
        if self.asked_to_stop or self.exhausted:
            return 0
        spare = max(1, ceil(self.schedule.concurrency * self.schedule.lookahead))
        target = self.schedule.concurrency - len(self.running) + spare
        if self.schedule.max_trials is not None:
            target = min(target, self.schedule.max_trials - self.started_trials)
        return max(0, target - len(self.ready) - in_preparation)

    def offer(self, individual: int) -> None:
        """Add a prepared network."""
        self.ready.append(individual)

    def start(self, now_s: float) -> Assignment | None:
        """Return the trial that starts now; None where none may start or no network is ready."""
        if self.must_cut(now_s) or len(self.running) >= self.schedule.concurrency:
            return None
        if self.retries:
            assignment = self.retries.popleft()
        elif self.ready and not self._all_started():
            trial, schedule = self.started_trials, self.schedule
            self.started_trials += 1
            assignment = Assignment(
                trial,
                self.ready.popleft(),
                schedule.round_of(trial),
                schedule.epochs_of(trial),
                1,
                schedule.tunes(trial),
            )
        else:
            return None
        self.running[assignment.trial] = assignment
        return assignment

    def ended(self, trial: int, status: TrialStatus, now_s: float) -> bool:
        """Record the end of a trial; return whether it will be tried again."""
        old = self.running.pop(trial)
        self.finished_trials += status == "finished"
        if status not in RETRIED or self.must_cut(now_s) or old.attempt >= self.schedule.max_attempts:
            return False
        self.retries.append(replace(old, attempt=old.attempt + 1))
        return True

    def stop_reason(self, now_s: float) -> StopReason | None:
        """Return why no further trial will start, or None."""
        if self.asked_to_stop:
            return "asked"
        if self.schedule.max_s is not None and now_s >= self.schedule.max_s:
            return "time"
        if self.retries:
            return None
        if self._all_started():
            return "trials"
        return "exhausted" if self.exhausted and not self.ready else None

    def must_cut(self, now_s: float) -> bool:
        """Return whether running trials must be cut."""
        return self.stop_reason(now_s) in ("time", "asked")

    def over(self, now_s: float) -> bool:
        """Return whether nothing runs and nothing will start."""
        return not self.running and self.stop_reason(now_s) is not None

    def remaining_s(self, now_s: float) -> float | None:
        """Return the remaining seconds; None where unbounded."""
        return None if self.schedule.max_s is None else max(0.0, self.schedule.max_s - now_s)

    def _all_started(self) -> bool:
        return self.schedule.max_trials is not None and self.started_trials >= self.schedule.max_trials


@dataclass
class EarlyStop:
    """Ends a trial whose validation loss has not fallen by ``min_delta`` for ``patience`` epochs."""

    patience: int
    min_delta: float = 1e-3
    best: float = float("inf")
    waited: int = 0

    @staticmethod
    def for_round(number: int) -> EarlyStop:
        """Return AIPerf's early stop: patience 6 + 2 x round, at most 20."""
        return EarlyStop(patience=min(6 + 2 * number, 20))

    def should_stop(self, validation_loss: float) -> bool:
        """Take the validation loss of one epoch and return whether the trial ends."""
        if validation_loss < self.best - self.min_delta:
            self.best, self.waited = validation_loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience
