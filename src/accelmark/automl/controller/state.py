"""The state of a search, computed from its journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from accelmark.automl.config import ScheduleConfig
from accelmark.automl.controller import journal
from accelmark.automl.records import FAILURES, RETRIED, EpochRecord, TrialRecord
from accelmark.automl.search.population import Individual, Population
from accelmark.automl.search.schedule import Assignment, Scheduler
from accelmark.spec.errors import RunError


@dataclass
class SearchState:
    """Sessions, networks, trials, epochs and clock of a search."""

    attempts: dict[tuple[int, int], TrialRecord] = field(default_factory=dict)
    """By trial and attempt."""
    epochs: list[EpochRecord] = field(default_factory=list)
    individuals: list[Individual] = field(default_factory=list)
    notes: list[journal.Note] = field(default_factory=list)
    clock_s: float = 0.0
    sessions: list[journal.SessionBegan] = field(default_factory=list)
    ended: journal.SessionEnded | None = None

    @staticmethod
    def of(events: Iterable[journal.Event]) -> SearchState:
        """Return the state after all events; raises RunError with the line of one that contradicts earlier ones."""
        state = SearchState()
        for line, event in enumerate(events, start=1):
            try:
                state.apply(event)
            except RunError as error:
                raise RunError(f"line {line} of the journal is about {error}") from error
        return state

    def apply(self, event: journal.Event) -> None:
        """Apply one event; raises RunError where it refers to an unknown network or trial."""
        known, clock_s = len(self.individuals), 0.0
        match event:
            case journal.SessionBegan(clock_s=clock_s):
                self.sessions.append(event)
                self.ended = None
            case journal.Proposed(individual=one):
                if not 0 <= one.id <= known:
                    raise RunError(f"network {one.id}, but only {known} networks were proposed before")
                self.individuals[one.id : one.id + 1] = [one]
            case journal.Valued(individual=number):
                if not 0 <= number < known:
                    raise RunError(f"the value of network {number}, which was not proposed before")
                changes = {"status": event.status, "value": event.value}
                self.individuals[number] = self.individuals[number].model_copy(update=changes)
            case journal.TrialEvent(trial=record):
                if record.individual >= known:
                    which = f"trial {record.trial} of network {record.individual}"
                    raise RunError(f"{which}, which was not proposed before")
                self.attempts[record.trial, record.attempt] = record
                clock_s = record.ended_s or record.started_s
            case journal.EpochEvent(epoch=epoch):
                key, clock_s = (epoch.trial, epoch.attempt), epoch.ended_s
                if key not in self.attempts:
                    raise RunError(f"an epoch of trial {key[0]}, attempt {key[1]}, which was not started before")
                self.epochs.append(epoch)
            case journal.Note():
                self.notes.append(event)  # notes do not advance the run's clock
            case journal.Heartbeat(clock_s=clock_s):
                pass
            case journal.SessionEnded(clock_s=clock_s):
                self.ended = event
        self.clock_s = max(self.clock_s, clock_s)

    @property
    def trials(self) -> dict[int, TrialRecord]:
        """The latest attempt of every trial."""
        return {trial: self.attempts[trial, attempt] for trial, attempt in sorted(self.attempts)}

    @property
    def interruptions(self) -> int:
        """Number of times that the run was resumed."""
        return max(0, len(self.sessions) - 1)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.sessions[-1].workers if self.sessions else 0

    @property
    def best_individual(self) -> int | None:
        """The individual whose trial reached the best validation accuracy, of those that gave a result."""
        with_result = {key: record for key, record in self.attempts.items() if record.status in ("finished", "cut")}
        reached = [
            (epoch.validation_accuracy, -epoch.trial, with_result[epoch.trial, epoch.attempt].individual)
            for epoch in self.epochs
            if epoch.validation_accuracy is not None and (epoch.trial, epoch.attempt) in with_result
        ]
        return max(reached)[-1] if reached else None

    def epochs_of(self, record: TrialRecord) -> list[EpochRecord]:
        """Return the epochs of one attempt."""
        return [epoch for epoch in self.epochs if (epoch.trial, epoch.attempt) == (record.trial, record.attempt)]

    def useful_epochs(self) -> list[EpochRecord]:
        """Return the scored epochs: those of attempts that gave a result or are running."""
        return [epoch for epoch in self.epochs if self.attempts[epoch.trial, epoch.attempt].status not in FAILURES]

    def population(self, seed: int) -> Population:
        """Return the population."""
        return Population(seed, list(self.individuals))

    def scheduler(self, schedule: ScheduleConfig) -> Scheduler:
        """Return the scheduler in this state; trials that were running are tried again."""
        trials = self.trials
        finished = sum(record.status == "finished" for record in trials.values())
        scheduler = Scheduler(schedule, started_trials=len(trials), finished_trials=finished)
        for record in trials.values():
            retried = record.status in RETRIED and record.attempt < schedule.max_attempts
            if record.status == "running" or retried:
                planned = record.trial, record.individual, record.round, record.epochs_planned
                scheduler.retries.append(Assignment(*planned, record.tuned, record.attempt + 1))
        started = {record.individual for record in trials.values()}
        for one in self.individuals:
            if one.status == "pending" and one.id not in started:
                scheduler.offer(one.id)
        return scheduler
