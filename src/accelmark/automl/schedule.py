"""The schedule of a search as a pure state machine: which trial starts when, how long, and when all is over.

It knows no clock, process or network: the engine feeds it the time and what happened, and so does the simulation in
``benchmarks/automl_scheduling.py``, which runs this very code.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Literal, final

from accelmark.automl.records import RETRIED, TrialStatus

AIPERF_ROUND_EPOCHS: Final = (15, 30, 45, 60)
AIPERF_TUNING_ROUND: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """How a search is scheduled.

    concurrency   trials at a time, exactly (AIPerf's trialConcurrency)
    max_trials    trials to start in all, exactly; retries of a trial are not new ones; None: no bound
    max_s         seconds on the run's clock after which all ends, trials cut off where they are; None: no bound
    round_epochs  epochs of a trial of the first, second ... round; the last holds for all later ones
    tuning_round  hyperparameters are searched from this round on; None: never
    max_attempts  how often a trial that gave no result is tried at most
    lookahead     share of ``concurrency`` for which next networks are kept ready (at least one)
    """

    concurrency: int
    max_trials: int | None = None
    max_s: float | None = None
    round_epochs: tuple[int, ...] = AIPERF_ROUND_EPOCHS
    tuning_round: int | None = AIPERF_TUNING_ROUND
    max_attempts: int = 2
    lookahead: float = 0.125

    def round_of(self, trial: int) -> int:
        """Return the round of the trial with this number (from 0): one round is ``concurrency`` trials."""
        return trial // self.concurrency + 1

    def epochs_of(self, trial: int) -> int:
        """Return how many epochs the trial is given."""
        return self.round_epochs[min(self.round_of(trial), len(self.round_epochs)) - 1]

    def tunes(self, trial: int) -> bool:
        """Tell whether the trial's hyperparameters are searched."""
        return self.tuning_round is not None and self.round_of(trial) >= self.tuning_round


@final
@dataclass(frozen=True, slots=True)
class Assignment:
    """A trial that is to start now."""

    trial: int
    individual: int
    round: int
    epochs: int
    attempt: int
    tuned: bool


StopReason = Literal["trials", "time", "asked", "exhausted"]


@dataclass
class Scheduler:
    """What is ready, running and done. Every method is told the time, in seconds on the run's clock."""

    schedule: Schedule
    ready: deque[int] = field(default_factory=deque)
    running: dict[int, Assignment] = field(default_factory=dict)
    retries: deque[Assignment] = field(default_factory=deque)
    started_trials: int = 0
    finished_trials: int = 0
    asked_to_stop: bool = False
    exhausted: bool = False

    def wanted(self, in_preparation: int = 0) -> int:
        """Return how many more networks to prepare, with ``in_preparation`` under way already."""
        if self.asked_to_stop or self.exhausted:
            return 0
        spare = max(1, ceil(self.schedule.concurrency * self.schedule.lookahead))
        free = self.schedule.concurrency - len(self.running)
        target = free + spare
        if self.schedule.max_trials is not None:
            target = min(target, self.schedule.max_trials - self.started_trials)
        return max(0, target - len(self.ready) - in_preparation)

    def offer(self, individual: int) -> None:
        """Put a prepared network on the shelf."""
        self.ready.append(individual)

    def start(self, now_s: float) -> Assignment | None:
        """Return the trial that starts now, or None when none may or no network is ready."""
        if self.stop_reason(now_s) in ("time", "asked") or len(self.running) >= self.schedule.concurrency:
            return None
        if self.retries:
            assignment = self.retries.popleft()
        elif self.ready and not self._all_started():
            trial = self.started_trials
            self.started_trials += 1
            assignment = Assignment(
                trial=trial,
                individual=self.ready.popleft(),
                round=self.schedule.round_of(trial),
                epochs=self.schedule.epochs_of(trial),
                attempt=1,
                tuned=self.schedule.tunes(trial),
            )
        else:
            return None
        self.running[assignment.trial] = assignment
        return assignment

    def ended(self, trial: int, status: TrialStatus, now_s: float) -> bool:
        """Note how a trial ended; return True when it will be tried again."""
        old = self.running.pop(trial)
        if status == "finished":
            self.finished_trials += 1
        if status not in RETRIED or self.stop_reason(now_s) in ("time", "asked"):
            return False
        if old.attempt >= self.schedule.max_attempts:
            return False
        self.retries.append(Assignment(old.trial, old.individual, old.round, old.epochs, old.attempt + 1, old.tuned))
        return True

    def stop_reason(self, now_s: float) -> StopReason | None:
        """Return why no new trial will start any more, or None."""
        if self.asked_to_stop:
            return "asked"
        if self.schedule.max_s is not None and now_s >= self.schedule.max_s:
            return "time"
        if self._all_started() and not self.retries:
            return "trials"
        if self.exhausted and not self.ready and not self.retries:
            return "exhausted"
        return None

    def must_cut(self, now_s: float) -> bool:
        """Tell whether running trials are to be cut off now."""
        return self.stop_reason(now_s) in ("time", "asked")

    def over(self, now_s: float) -> bool:
        """Tell whether the run is done: nothing runs and nothing will."""
        return not self.running and self.stop_reason(now_s) is not None

    def remaining_s(self, now_s: float) -> float | None:
        """Return how many seconds are left, or None without a bound."""
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
        """Return AIPerf's: the patience grows with the round, 6 + 2 x round, at most 20."""
        return EarlyStop(patience=min(6 + 2 * number, 20))

    def should_stop(self, validation_loss: float) -> bool:
        """Take in one epoch's validation loss and tell whether the trial is to end."""
        if validation_loss < self.best - self.min_delta:
            self.best, self.waited = validation_loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience
