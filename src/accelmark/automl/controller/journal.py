"""The durable record of a search: one line per event, flushed to disk before anything else happens.

The state of a search is computed from its journal only, so that another controller can continue after a kill. Each line
has the SHA-256 of the line before, the first line that of configuration and seed network, so that changed, inserted or
removed lines are detected.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from accelmark.automl.records import EpochRecord, NonNegative, Record, Splits, TrialRecord
from accelmark.automl.search.population import Individual, IndividualStatus
from accelmark.spec.errors import RunError

JOURNAL_FILE: Final = "journal.jsonl"
CONFIG_FILE: Final = "automl.json"
NETWORK_FILE: Final = "network.json"


class _Event(Record):
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

    model_config = ConfigDict(populate_by_name=True)

    event: Literal["valued"] = "valued"
    individual: int
    status: IndividualStatus = Field(validation_alias=AliasChoices("status", "standing"))
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
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
            raise RunError(f"{path}: line {number} is not a valid event: {where}{first['msg']}") from error
    return events


class HashChain(NamedTuple):
    """The result of following the hashes through a journal.

    lines     number of lines
    unhashed  leading lines without a hash, from an early version
    broken    first line (from 1) whose hash is not that of the line before; None where all are
    """

    lines: int
    unhashed: int
    broken: int | None


def read_chain(directory: Path, events: list[Event]) -> HashChain:
    """Follow the hashes through a journal with these events.

    Not detected: a change of the last line alone, lines removed at the end, and a journal whose hashes were all
    recomputed.
    """
    expected, unhashed = _sha256_of_request(directory), 0
    lines = _complete_lines(directory / JOURNAL_FILE)
    for number, (line, event) in enumerate(zip(lines, events, strict=False), start=1):
        if event.after is None and unhashed == number - 1:
            unhashed = number
        elif event.after != expected:
            return HashChain(len(lines), unhashed, number)
        expected = sha256(line).hexdigest()
    return HashChain(len(lines), unhashed, None)
