"""Score, error and regulated score of a search at any time of its clock.

Score = operations / seconds from the first attempt's start to the last recorded epoch of any attempt; operations are
those of attempts that gave a result. Error = 1 - accuracy. Regulated score = -ln(Error) x Score.
"""

from __future__ import annotations

from math import log

from accelmark.automl.controller.journal import SearchState
from accelmark.automl.records import TrialRecord
from accelmark.results.rounds.search import SearchPoint, SearchUtilisation


def regulated(score: float, error: float | None) -> float | None:
    """Return -ln(error) x score; None without an error, or with an error of 0, whose logarithm is infinite."""
    return None if error is None or error <= 0 else -log(error) * score


class Scoreboard:
    """The scored records of a search.

    trials     the latest attempt of each trial
    epochs     those of attempts that gave a result or are running
    started_s  start of the first attempt of any trial
    ended_s    end of the last recorded epoch (or part of one) of any attempt
    """

    def __init__(self, state: SearchState) -> None:
        self.trials = state.trials
        self.epochs = state.useful_epochs()
        self.started_s = min((record.started_s for record in state.attempts.values()), default=0.0)
        self.ended_s = max((epoch.ended_s for epoch in state.epochs), default=self.started_s)

    def operations_until(self, time_s: float) -> float:
        """Return the operations until ``time_s``; an epoch under way counts by its share of time."""
        total = 0.0
        for epoch in self.epochs:
            if epoch.begun_s < time_s:
                operations = self.trials[epoch.trial].cost.operations(epoch)
                done = epoch.ended_s <= time_s
                total += operations * (1 if done else (time_s - epoch.begun_s) / (epoch.ended_s - epoch.begun_s))
        return total

    def best_trial_at(self, time_s: float) -> TrialRecord | None:
        """Return the trial with the best validation accuracy among those with a held-out accuracy."""
        ended = [
            trial
            for trial in self.trials.values()
            if trial.held_out_accuracy is not None and trial.ended_s is not None and trial.ended_s <= time_s
        ]
        return max(ended, key=lambda trial: (self.best_validation(trial.trial) or 0.0, -trial.trial), default=None)

    def best_validation(self, trial: int) -> float | None:
        """Return a trial's best validation accuracy."""
        reached = [epoch.validation_accuracy for epoch in self.epochs if epoch.trial == trial]
        return max((accuracy for accuracy in reached if accuracy is not None), default=None)

    def at(self, time_s: float, errors_at_s: float | None = None) -> SearchPoint:
        """Return all figures at ``time_s``; the held-out error at ``errors_at_s`` where that is given.

        The search's error is that of the best epoch that ended by then, the held-out error that of the best trial.
        """
        elapsed_s, operations = time_s - self.started_s, self.operations_until(time_s)
        score = operations / elapsed_s if elapsed_s > 0 else 0.0
        best = self.best_trial_at(time_s if errors_at_s is None else errors_at_s)
        error = 1 - best.held_out_accuracy if best is not None and best.held_out_accuracy is not None else None
        ended = [epoch.validation_accuracy for epoch in self.epochs if epoch.ended_s <= time_s]
        search_error = min((1 - accuracy for accuracy in ended if accuracy is not None), default=None)
        return SearchPoint(
            time_h=elapsed_s / 3600,
            operations=operations,
            score=score,
            error=error,
            search_error=search_error,
            regulated_score=regulated(score, error),
            regulated_search_score=regulated(score, search_error),
        )

    def final(self) -> SearchPoint:
        """Return the figures of the whole run: the score ends with the last epoch, held-out evaluations may follow."""
        last = max([self.ended_s, *(trial.ended_s or 0.0 for trial in self.trials.values())])
        return self.at(self.ended_s, last)

    def series(self, step_s: float) -> tuple[SearchPoint, ...]:
        """Return the figures every ``step_s`` and at the end."""
        length_s = self.ended_s - self.started_s
        if length_s <= 0:
            return ()
        times = [self.started_s + step_s * number for number in range(1, int(length_s / step_s) + 1)]
        return (*(self.at(time) for time in times if self.ended_s - time > 1e-9), self.final())


def utilisation(state: SearchState) -> SearchUtilisation:
    """Return the use of the workers' time from the first trial's start to the last one's end, all attempts included."""
    records, epochs = list(state.attempts.values()), state.epochs
    ends = [*(record.ended_s or record.started_s for record in records), *(epoch.ended_s for epoch in epochs)]
    started_s = min((record.started_s for record in records), default=0.0)
    available_s = state.workers * (max(ends, default=0.0) - started_s)
    training_s = sum(epoch.training_s for epoch in epochs)
    evaluating_s = sum(epoch.evaluating_s for epoch in epochs) + sum(record.held_out_s for record in records)
    worked_s = training_s + evaluating_s
    return SearchUtilisation(
        workers=state.workers,
        available_s=available_s,
        training_s=training_s,
        evaluating_s=evaluating_s,
        idle_share=max(0.0, 1 - worked_s / available_s) if worked_s > 0 and available_s > 0 else None,
    )
