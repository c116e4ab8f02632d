"""What a run's events come to: trials, epochs, the family, the clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from accelmark.automl.engine.journal import (
    Beat,
    EpochDone,
    Event,
    JournalError,
    Note,
    Proposed,
    SessionBegan,
    SessionEnded,
    Tried,
    Valued,
)
from accelmark.automl.records import FAILURES, RETRIED, EpochRecord, TrialRecord
from accelmark.automl.schedule import Assignment, Schedule, Scheduler
from accelmark.automl.score import Scoreboard, Utilisation, utilisation
from accelmark.automl.search import Family, Individual


@dataclass
class RunState:
    """The state of a run, folded from its journal."""

    attempts: dict[tuple[int, int], TrialRecord] = field(default_factory=dict)
    epochs: list[EpochRecord] = field(default_factory=list)
    individuals: list[Individual] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    clock_s: float = 0.0
    sessions: list[SessionBegan] = field(default_factory=list)
    ended: SessionEnded | None = None
    best_individual: int | None = None
    """Whose trial reached the best validation accuracy, of those that gave a result."""
    _best: tuple[float, int] = (-1.0, 0)
    _peaks: dict[tuple[int, int], float] = field(default_factory=dict)

    @staticmethod
    def folded(events: Iterable[Event]) -> RunState:
        """Fold events, oldest first; raises JournalError with the line of one that no earlier line explains."""
        state = RunState()
        for line, event in enumerate(events, start=1):
            try:
                state.take(event)
            except JournalError as error:
                raise JournalError(f"line {line} of the journal tells of {error}") from error
        return state

    def take(self, event: Event) -> None:
        """Take in one event; raises JournalError when it is about a network or a trial that is not known."""
        self._check(event)
        match event:
            case SessionBegan():
                self.sessions.append(event)
                self.ended = None
                self.clock_s = max(self.clock_s, event.clock_s)
            case Proposed():
                if event.individual.id == len(self.individuals):
                    self.individuals.append(event.individual)
                else:
                    self.individuals[event.individual.id] = event.individual
            case Valued():
                old = self.individuals[event.individual]
                changes = {"standing": event.standing, "value": event.value}
                self.individuals[event.individual] = old.model_copy(update=changes)
            case Tried():
                self.attempts[event.trial.trial, event.trial.attempt] = event.trial
                self.clock_s = max(self.clock_s, event.trial.ended_s or event.trial.started_s)
                self._compare(event.trial)
            case EpochDone():
                self.epochs.append(event.epoch)
                key = (event.epoch.trial, event.epoch.attempt)
                self._peaks[key] = max(self._peaks.get(key, -1.0), event.epoch.validation_accuracy or -1.0)
                self.clock_s = max(self.clock_s, event.epoch.ended_s)
            case Note():
                self.notes.append(event)
            case Beat():
                self.clock_s = max(self.clock_s, event.clock_s)
            case SessionEnded():
                self.ended = event
                self.clock_s = max(self.clock_s, event.clock_s)

    def _check(self, event: Event) -> None:
        known = len(self.individuals)
        match event:
            case Proposed(individual=one) if not 0 <= one.id <= known:
                raise JournalError(f"network {one.id}; only {known} networks were proposed before it")
            case Valued(individual=number) if not 0 <= number < known:
                raise JournalError(f"the value of network {number}, which no line before it proposes")
            case Tried(trial=record) if record.individual >= known:
                raise JournalError(
                    f"trial {record.trial} of network {record.individual}, which no line before it proposes"
                )
            case EpochDone(epoch=epoch) if (epoch.trial, epoch.attempt) not in self.attempts:
                raise JournalError(
                    f"an epoch of trial {epoch.trial}, attempt {epoch.attempt}, which no line before it starts"
                )
            case _:
                pass

    def _compare(self, record: TrialRecord) -> None:
        if record.status in ("finished", "cut"):
            reached = (self._peaks.pop((record.trial, record.attempt), -1.0), -record.trial)
            if reached[0] >= 0 and reached > self._best:
                self._best, self.best_individual = reached, record.individual

    @property
    def trials(self) -> dict[int, TrialRecord]:
        """The latest attempt of every trial."""
        latest: dict[int, TrialRecord] = {}
        for trial, attempt in sorted(self.attempts):
            latest[trial] = self.attempts[trial, attempt]
        return latest

    @property
    def interruptions(self) -> int:
        """How often the run was taken up again."""
        return max(0, len(self.sessions) - 1)

    @property
    def workers(self) -> int:
        """How many workers the run has."""
        return self.sessions[-1].workers if self.sessions else 0

    def useful_epochs(self) -> list[EpochRecord]:
        """Return the epochs that are scored: those of attempts that gave a result or still may."""
        return [
            epoch
            for epoch in self.epochs
            if (record := self.attempts.get((epoch.trial, epoch.attempt))) and record.status not in FAILURES
        ]

    def scoreboard(self) -> Scoreboard:
        """Return the figures of the run. Work of attempts that gave no result is time spent, not work done."""
        failed = {key: record for key, record in self.attempts.items() if record.status in FAILURES}
        return Scoreboard(
            trials=self.trials,
            epochs=self.useful_epochs(),
            failed_attempts=list(failed.values()),
            failed_epochs=[epoch for epoch in self.epochs if (epoch.trial, epoch.attempt) in failed],
        )

    def utilisation(self) -> Utilisation:
        """Return how the workers' time was spent, all attempts included, until the last trial ended."""
        records = list(self.attempts.values())
        until = max([record.ended_s or record.started_s for record in records], default=0.0)
        until = max([until, *(epoch.ended_s for epoch in self.epochs)])
        return utilisation(records, self.epochs, workers=self.workers, until_s=until)

    def family(self, seed: int) -> Family:
        """Return the family with every value that trials gave."""
        return Family(seed=seed, individuals=list(self.individuals))

    def scheduler(self, schedule: Schedule) -> Scheduler:
        """Return the scheduler as it was: trials that were under way are to be tried again."""
        trials = self.trials
        scheduler = Scheduler(schedule, started_trials=len(trials))
        scheduler.finished_trials = sum(record.status == "finished" for record in trials.values())
        for record in trials.values():
            may_retry = record.status in RETRIED and record.attempt < schedule.max_attempts
            if record.status == "running" or may_retry:
                scheduler.retries.append(
                    Assignment(
                        trial=record.trial,
                        individual=record.individual,
                        round=record.round,
                        epochs=record.epochs_planned,
                        attempt=record.attempt + 1,
                        tuned=record.tuned,
                    )
                )
        started = {record.individual for record in trials.values()}
        for one in self.individuals:
            if one.standing == "pending" and one.id not in started:
                scheduler.offer(one.id)
        return scheduler
