"""The durable record of a search, one line per event, flushed to disk before anything else happens, and its state.

The state of a search is computed from its journal only, so that another controller can continue after a kill. Each line
has the SHA-256 of the line before, the first line that of configuration and seed network, so that changed, inserted or
removed lines are detected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from accelmark.automl.records import FAILURES, EpochRecord, Individual, NonNegative, Splits, TrialRecord
from accelmark.spec.errors import RunError
from accelmark.spec.model import Spec, first_error

JOURNAL_FILE: Final = "journal.jsonl"
CONFIG_FILE: Final = "automl.json"
NETWORK_FILE: Final = "network.json"


class _Event(Spec):
    after: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the line before; None in lines of early versions."""


class SessionBegan(_Event):
    """A controller started or resumed the run at ``clock_s`` of the run's clock.

    ``at`` is UTC, ISO 8601; ``monotonic_s`` the host's monotonic clock at that time, as in telemetry. Journals of early
    versions have no ``splits``.
    """

    event: Literal["session-began"] = "session-began"
    at: str
    clock_s: NonNegative
    monotonic_s: float = 0.0
    host: str
    pid: int
    experiment: str
    dataset_fingerprint: str
    dataset_identity: str | None = None
    splits: Splits | None = None
    workers: Annotated[int, Field(ge=1)]


class Proposed(_Event):
    """A network was added, or its hyperparameters were written into it."""

    event: Literal["proposed"] = "proposed"
    individual: Individual
    searcher: str
    seconds: float | None = None


class Valued(_Event):
    """The trial of a network ended, with a value or without one."""

    event: Literal["valued"] = "valued"
    individual: int
    status: Literal["observed", "lost"] = Field(validation_alias=AliasChoices("status", "standing"))
    value: float | None


class TrialEvent(_Event):
    """A trial started or changed; the latest event of an attempt is valid."""

    event: Literal["trial"] = "trial"
    trial: TrialRecord


class EpochEvent(_Event):
    """An epoch, or a part of one, ended."""

    event: Literal["epoch"] = "epoch"
    epoch: EpochRecord


class Heartbeat(_Event):
    """The controller ran at this time of the run's clock."""

    event: Literal["beat"] = "beat"
    clock_s: NonNegative


class Note(_Event):
    """A remark for readers: a worker lost, a trial retried."""

    event: Literal["note"] = "note"
    clock_s: NonNegative
    text: str


class SessionEnded(_Event):
    """The controller ended the session; with ``over`` the run is complete and cannot be resumed."""

    event: Literal["session-ended"] = "session-ended"
    clock_s: NonNegative
    reason: str
    over: bool


Event = Annotated[
    SessionBegan | Proposed | Valued | TrialEvent | EpochEvent | Heartbeat | Note | SessionEnded,
    Field(discriminator="event"),
]

_EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Event)


class Journal:
    """Appends events to a file; each is on disk when ``write`` returns."""

    def __init__(self, directory: Path) -> None:
        path = directory / JOURNAL_FILE
        lines = _complete_lines(path) if path.exists() else []
        self._last = sha256(lines[-1]).hexdigest() if lines else _sha256_of_request(directory)
        self._file = path.open("ab")
        self._file.truncate(sum(len(line) + 1 for line in lines))  # a kill may have left an incomplete line

    def write(self, event: Event) -> None:
        """Append an event with the hash of the one before, and sync it to disk."""
        line = event.model_copy(update={"after": self._last}).model_dump_json().encode()
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last = sha256(line).hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sha256_of_request(directory: Path) -> str:
    paths = (directory / CONFIG_FILE, directory / NETWORK_FILE)
    return sha256(b"\0".join(path.read_bytes() for path in paths if path.is_file())).hexdigest()


def _complete_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


def read_journal(directory: Path) -> list[Event]:
    """Return all events of a run without an incomplete last line; raises RunError with the line of an invalid one."""
    path, events = directory / JOURNAL_FILE, []
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            events.append(_EVENTS.validate_json(line))
        except ValidationError as error:
            raise RunError(f"{path}: line {number} is not a valid event: {first_error(error)}") from error
    return events


def follow_hashes(directory: Path, events: Sequence[Event]) -> tuple[int, int | None]:
    """Follow the hashes through a journal with these events.

    Not detected: a change of the last line alone, lines removed at the end, and a journal whose hashes were all
    recomputed.

    Returns:
        The number of leading lines without a hash, from an early version, and the first line (from 1) whose hash is not
        that of the line before; None where all are.
    """
    expected, unhashed = _sha256_of_request(directory), 0
    lines = _complete_lines(directory / JOURNAL_FILE)
    for number, (line, event) in enumerate(zip(lines, events, strict=False), start=1):
        if event.after is None and unhashed == number - 1:
            unhashed = number
        elif event.after != expected:
            return unhashed, number
        expected = sha256(line).hexdigest()
    return unhashed, None


@dataclass
class SearchState:
    """Sessions, networks, trials, epochs and clock of a search."""

    attempts: dict[tuple[int, int], TrialRecord] = field(default_factory=dict)
    """By trial and attempt."""
    epochs: list[EpochRecord] = field(default_factory=list)
    individuals: list[Individual] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    clock_s: float = 0.0
    sessions: list[SessionBegan] = field(default_factory=list)
    ended: SessionEnded | None = None

    @staticmethod
    def of(events: Iterable[Event]) -> SearchState:
        """Return the state after all events; raises RunError with the line of one that contradicts earlier ones."""
        state = SearchState()
        for line, event in enumerate(events, start=1):
            try:
                state.apply(event)
            except RunError as error:
                raise RunError(f"line {line} of the journal is about {error}") from error
        return state

    def apply(self, event: Event) -> None:
        """Apply one event; raises RunError where it refers to an unknown network or trial."""
        known, clock_s = len(self.individuals), 0.0
        match event:
            case SessionBegan(clock_s=clock_s):
                self.sessions.append(event)
                self.ended = None
            case Proposed(individual=one):
                if not 0 <= one.id <= known:
                    raise RunError(f"network {one.id}, but only {known} networks were proposed before")
                self.individuals[one.id : one.id + 1] = [one]
            case Valued(individual=number):
                if not 0 <= number < known:
                    raise RunError(f"the value of network {number}, which was not proposed before")
                changes = {"status": event.status, "value": event.value}
                self.individuals[number] = self.individuals[number].model_copy(update=changes)
            case TrialEvent(trial=record):
                if record.individual >= known:
                    which = f"trial {record.trial} of network {record.individual}"
                    raise RunError(f"{which}, which was not proposed before")
                self.attempts[record.trial, record.attempt] = record
                clock_s = record.ended_s or record.started_s
            case EpochEvent(epoch=epoch):
                key, clock_s = (epoch.trial, epoch.attempt), epoch.ended_s
                if key not in self.attempts:
                    raise RunError(f"an epoch of trial {key[0]}, attempt {key[1]}, which was not started before")
                self.epochs.append(epoch)
            case Note():
                self.notes.append(event)  # notes do not advance the run's clock
            case Heartbeat(clock_s=clock_s):
                pass
            case SessionEnded(clock_s=clock_s):
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
