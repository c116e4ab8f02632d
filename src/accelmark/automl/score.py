"""Score, Error and Regulated score: pure functions of the recorded epochs.

Score = operations / seconds from the first attempt's start to the last recorded epoch of any attempt; operations are
those of attempts that gave a result. Error = 1 - accuracy. Regulated score = -ln(Error) x Score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Final, final

from accelmark.automl.records import EpochRecord, TrialRecord

SAMPLE_S: Final = 360.0


@final
@dataclass(frozen=True, slots=True)
class ScorePoint:
    """The figures of a run at one moment of its clock.

    score                       operations per second since the first attempt's start
    error                       of the best network so far on the held-out split, which the search never saw;
                                None until one trial was evaluated on it
    search_error                the best of all peeks at the validation split: optimistic, disclosed beside it
    regulated_score             -ln(error) x score; None without an error, or with an error of 0
    regulated_search_score      the same of ``search_error``: what AIPerf reports
    """

    time_s: float
    operations: float
    score: float
    error: float | None
    search_error: float | None
    regulated_score: float | None
    regulated_search_score: float | None


def regulated(score: float, error: float | None) -> float | None:
    """Return -ln(error) x score; None when there is no error or it is 0, whose logarithm is infinite."""
    if error is None or error <= 0:
        return None
    return -log(error) * score


@final
@dataclass(frozen=True, slots=True)
class Scoreboard:
    """The records of one run, ready to be asked for its figures at any moment.

    trials           the latest attempt of each trial
    epochs           those that are scored
    failed_attempts  all attempts that gave no result: they spent time
    failed_epochs    their epochs: time, and no operations
    """

    trials: Mapping[int, TrialRecord]
    epochs: Sequence[EpochRecord]
    failed_attempts: Sequence[TrialRecord] = ()
    failed_epochs: Sequence[EpochRecord] = ()

    @property
    def started_s(self) -> float:
        """When the first attempt of any trial started."""
        return min((one.started_s for one in (*self.trials.values(), *self.failed_attempts)), default=0.0)

    @property
    def ended_s(self) -> float:
        """When the last recorded epoch (or part of one) of any attempt ended."""
        return max((epoch.ended_s for epoch in (*self.epochs, *self.failed_epochs)), default=self.started_s)

    def operations_until(self, time_s: float) -> float:
        """Return the operations done by ``time_s``; an epoch that is under way counts by its share of time."""
        return sum(self._share(epoch, time_s) for epoch in self.epochs if epoch.begun_s < time_s)

    def _share(self, epoch: EpochRecord, time_s: float) -> float:
        operations = self.trials[epoch.trial].cost.of(epoch)
        if epoch.ended_s <= time_s:
            return float(operations)
        return operations * (time_s - epoch.begun_s) / (epoch.ended_s - epoch.begun_s)

    def search_error_at(self, time_s: float) -> float | None:
        """Return 1 - the best validation accuracy of any epoch that ended by ``time_s``."""
        seen = [
            epoch.validation_accuracy
            for epoch in self.epochs
            if epoch.ended_s <= time_s and epoch.validation_accuracy is not None
        ]
        return 1 - max(seen) if seen else None

    def held_out_error_at(self, time_s: float) -> float | None:
        """Return the held-out error of the trial that validation says is best, of those ended by ``time_s``."""
        best = self.best_trial_at(time_s)
        return 1 - best.held_out_accuracy if best and best.held_out_accuracy is not None else None

    def best_trial_at(self, time_s: float) -> TrialRecord | None:
        """Return the trial with the best validation accuracy among those with a held-out figure."""
        ended = [
            trial
            for trial in self.trials.values()
            if trial.held_out_accuracy is not None and trial.ended_s is not None and trial.ended_s <= time_s
        ]
        return max(ended, key=lambda trial: (self.best_validation(trial.trial), -trial.trial), default=None)

    def best_validation(self, trial: int) -> float:
        """Return a trial's best validation accuracy; 0 when it has none."""
        return max(
            (
                epoch.validation_accuracy
                for epoch in self.epochs
                if epoch.trial == trial and epoch.validation_accuracy is not None
            ),
            default=0.0,
        )

    def at(self, time_s: float) -> ScorePoint:
        """Return all figures at ``time_s``."""
        elapsed = time_s - self.started_s
        operations = self.operations_until(time_s)
        score = operations / elapsed if elapsed > 0 else 0.0
        error, search_error = self.held_out_error_at(time_s), self.search_error_at(time_s)
        return ScorePoint(
            time_s=time_s,
            operations=operations,
            score=score,
            error=error,
            search_error=search_error,
            regulated_score=regulated(score, error),
            regulated_search_score=regulated(score, search_error),
        )

    def final(self) -> ScorePoint:
        """Return the figures of the whole run.

        The clock of the score ends with the last recorded epoch; errors count held-out evaluations after it too.
        """
        end = self.ended_s
        last = max([end, *(trial.ended_s or 0.0 for trial in self.trials.values())])
        point = self.at(end)
        error = self.held_out_error_at(last)
        return ScorePoint(
            time_s=end,
            operations=point.operations,
            score=point.score,
            error=error,
            search_error=point.search_error,
            regulated_score=regulated(point.score, error),
            regulated_search_score=point.regulated_search_score,
        )

    def series(self, step_s: float = SAMPLE_S) -> tuple[ScorePoint, ...]:
        """Return the figures every ``step_s`` (0.1 h unless told otherwise) and at the end."""
        length = self.ended_s - self.started_s
        if length <= 0:
            return ()
        times = [self.started_s + step_s * number for number in range(1, int(length / step_s) + 1)]
        points = [self.at(time) for time in times if self.ended_s - time > 1e-9]
        return (*points, self.final())


@final
@dataclass(frozen=True, slots=True)
class Utilisation:
    """How the accelerators' time inside a run was spent, in seconds summed over workers."""

    available_s: float
    training_s: float
    evaluating_s: float

    @property
    def idle_share(self) -> float | None:
        """Return the share that was neither training nor evaluating; None before any epoch was recorded."""
        worked_s = self.training_s + self.evaluating_s
        return max(0.0, 1 - worked_s / self.available_s) if worked_s > 0 and self.available_s > 0 else None


def utilisation(
    trials: Iterable[TrialRecord], epochs: Iterable[EpochRecord], *, workers: int, until_s: float
) -> Utilisation:
    """Add up what ``workers`` workers did from the first trial's start to ``until_s``."""
    known = list(trials)
    started = min((trial.started_s for trial in known), default=until_s)
    done = list(epochs)
    return Utilisation(
        available_s=workers * (until_s - started),
        training_s=sum(epoch.training_s for epoch in done),
        evaluating_s=sum(epoch.evaluating_s for epoch in done) + sum(trial.held_out_s for trial in known),
    )
