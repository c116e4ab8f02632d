"""Score, error and regulated score as pure functions of the recorded epochs.

Score = operations / seconds from the first attempt's start to the last recorded epoch of any attempt; operations are
those of attempts that gave a result. Error = 1 - accuracy. Regulated score = -ln(Error) x Score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Final, final

from accelmark.automl.controller.state import SearchState
from accelmark.automl.records import FAILURES, EpochRecord, TrialRecord
from accelmark.results.rounds.search import SearchUtilisation

SAMPLE_S: Final = 360.0


@final
@dataclass(frozen=True, slots=True)
class ScorePoint:
    """The figures of a run at one time of its clock.

    score                   operations per second since the first attempt's start
    error                   of the best network so far on the held-out split; None before the first evaluation on it
    search_error            1 - the best of all validation accuracies: optimistic, disclosed
    regulated_score         -ln(error) x score; None without an error, or with an error of 0
    regulated_search_score  the same with ``search_error``: what AIPerf reports
    """

    time_s: float
    operations: float
    score: float
    error: float | None
    search_error: float | None

    @property
    def regulated_score(self) -> float | None:
        """The score regulated by the held-out error."""
        return regulated(self.score, self.error)

    @property
    def regulated_search_score(self) -> float | None:
        """The score regulated by the search error."""
        return regulated(self.score, self.search_error)


def regulated(score: float, error: float | None) -> float | None:
    """Return -ln(error) x score; None without an error, or with an error of 0, whose logarithm is infinite."""
    return None if error is None or error <= 0 else -log(error) * score


@final
@dataclass(frozen=True, slots=True)
class Scoreboard:
    """The records of one run.

    trials           the latest attempt of each trial
    epochs           those that are scored
    failed_attempts  all attempts without a result: time, but no operations
    failed_epochs    their epochs
    """

    trials: Mapping[int, TrialRecord]
    epochs: Sequence[EpochRecord]
    failed_attempts: Sequence[TrialRecord] = ()
    failed_epochs: Sequence[EpochRecord] = ()

    @property
    def started_s(self) -> float:
        """Start of the first attempt of any trial."""
        return min((one.started_s for one in (*self.trials.values(), *self.failed_attempts)), default=0.0)

    @property
    def ended_s(self) -> float:
        """End of the last recorded epoch (or part of one) of any attempt."""
        return max((epoch.ended_s for epoch in (*self.epochs, *self.failed_epochs)), default=self.started_s)

    def operations_until(self, time_s: float) -> float:
        """Return the operations until ``time_s``; an epoch under way counts by its share of time."""
        total = 0.0
        for epoch in self.epochs:
            if epoch.begun_s < time_s:
                operations = self.trials[epoch.trial].cost.operations(epoch)
                done = epoch.ended_s <= time_s
                total += operations * (1 if done else (time_s - epoch.begun_s) / (epoch.ended_s - epoch.begun_s))
        return total

    def search_error_at(self, time_s: float) -> float | None:
        """Return 1 - the best validation accuracy of any epoch that ended by ``time_s``."""
        ended = [epoch.validation_accuracy for epoch in self.epochs if epoch.ended_s <= time_s]
        reached = [accuracy for accuracy in ended if accuracy is not None]
        return 1 - max(reached) if reached else None

    def held_out_error_at(self, time_s: float) -> float | None:
        """Return the held-out error of the best trial by validation, of those that ended by ``time_s``."""
        best = self.best_trial_at(time_s)
        return 1 - best.held_out_accuracy if best is not None and best.held_out_accuracy is not None else None

    def best_trial_at(self, time_s: float) -> TrialRecord | None:
        """Return the trial with the best validation accuracy among those with a held-out accuracy."""
        ended = [
            trial
            for trial in self.trials.values()
            if trial.held_out_accuracy is not None and trial.ended_s is not None and trial.ended_s <= time_s
        ]
        return max(ended, key=lambda trial: (self.best_validation(trial.trial), -trial.trial), default=None)

    def best_validation(self, trial: int) -> float:
        """Return a trial's best validation accuracy; 0 where it has none."""
        return max((epoch.validation_accuracy or 0.0 for epoch in self.epochs if epoch.trial == trial), default=0.0)

    def at(self, time_s: float, errors_at_s: float | None = None) -> ScorePoint:
        """Return all figures at ``time_s``; the held-out error at ``errors_at_s`` where that is given."""
        elapsed = time_s - self.started_s
        operations = self.operations_until(time_s)
        score = operations / elapsed if elapsed > 0 else 0.0
        error = self.held_out_error_at(time_s if errors_at_s is None else errors_at_s)
        return ScorePoint(time_s, operations, score, error, self.search_error_at(time_s))

    def final(self) -> ScorePoint:
        """Return the figures of the whole run: the score ends with the last epoch, held-out evaluations may follow."""
        last = max([self.ended_s, *(trial.ended_s or 0.0 for trial in self.trials.values())])
        return self.at(self.ended_s, last)

    def series(self, step_s: float = SAMPLE_S) -> tuple[ScorePoint, ...]:
        """Return the figures every ``step_s`` and at the end."""
        length = self.ended_s - self.started_s
        if length <= 0:
            return ()
        times = [self.started_s + step_s * number for number in range(1, int(length / step_s) + 1)]
        return (*(self.at(time) for time in times if self.ended_s - time > 1e-9), self.final())


def scoreboard(state: SearchState) -> Scoreboard:
    """Return the records for the figures; work of failed attempts is time without operations."""
    failed = {key: record for key, record in state.attempts.items() if record.status in FAILURES}
    return Scoreboard(
        trials=state.trials,
        epochs=state.useful_epochs(),
        failed_attempts=list(failed.values()),
        failed_epochs=[epoch for epoch in state.epochs if (epoch.trial, epoch.attempt) in failed],
    )


def utilisation(state: SearchState) -> SearchUtilisation:
    """Return the use of the workers' time from the first trial's start to the last one's end, all attempts included."""
    records = list(state.attempts.values())
    ends = [*(record.ended_s or record.started_s for record in records), *(epoch.ended_s for epoch in state.epochs)]
    return time_used(records, state.epochs, workers=state.workers, until_s=max(ends, default=0.0))


def time_used(
    trials: Iterable[TrialRecord], epochs: Iterable[EpochRecord], *, workers: int, until_s: float
) -> SearchUtilisation:
    """Return the use of the workers' time from the first trial's start to ``until_s``."""
    known, done = list(trials), list(epochs)
    available_s = workers * (until_s - min((trial.started_s for trial in known), default=until_s))
    training_s = sum(epoch.training_s for epoch in done)
    evaluating_s = sum(epoch.evaluating_s for epoch in done) + sum(trial.held_out_s for trial in known)
    worked_s = training_s + evaluating_s
    return SearchUtilisation(
        workers=workers,
        available_s=available_s,
        training_s=training_s,
        evaluating_s=evaluating_s,
        idle_share=max(0.0, 1 - worked_s / available_s) if worked_s > 0 and available_s > 0 else None,
    )
