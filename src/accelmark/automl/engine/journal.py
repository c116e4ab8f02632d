"""The durable record of a run: one line an event, flushed to disk before anything else happens.

A run is what its journal says. A killed coordinator leaves a journal from which another goes on. Each line carries the
hash of the one before it, the first that of what the run was asked for, so that a line that was changed or taken out
later, or put in, is told.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Literal, Self, final

from pydantic import Field, TypeAdapter, ValidationError

from accelmark.automl.records import EpochRecord, NonNegative, Record, TrialRecord
from accelmark.automl.search import Individual, Standing
from accelmark.spec.errors import RunError

NAME: Final = "journal.jsonl"
CONFIG: Final = "automl.json"
NETWORK: Final = "network.json"


class Line(Record):
    """What all lines share: ``after`` is the SHA-256 of the line before, None in lines of older versions."""

    after: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class Splits(Record):
    """How many pictures each split of the data holds, as the workers found them, and of how many classes."""

    training: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=1)]
    held_out: Annotated[int, Field(ge=1)]
    classes: Annotated[int, Field(ge=1)]

    @staticmethod
    def of(sizes: tuple[int, int, int, int]) -> Splits:
        """Take what a worker says of itself when it is ready."""
        return Splits(**dict(zip(("training", "validation", "held_out", "classes"), sizes, strict=True)))


class SessionBegan(Line):
    """A coordinator took up the run, at ``clock_s`` of the run's clock.

    ``at`` is UTC, ISO 8601; ``monotonic_s`` the host's monotonic clock at that moment, which telemetry is stamped with.
    ``splits`` is None in journals of older versions.
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


class Proposed(Line):
    """A network joined the family, or its hyperparameters were written into it."""

    event: Literal["proposed"] = "proposed"
    individual: Individual
    searcher: str
    seconds: float | None = None


class Valued(Line):
    """A network's trial gave it a value, or gave nothing."""

    event: Literal["valued"] = "valued"
    individual: int
    standing: Standing
    value: float | None


class Tried(Line):
    """A trial began, or what is known of it changed; the latest of one trial and attempt holds."""

    event: Literal["trial"] = "trial"
    trial: TrialRecord


class EpochDone(Line):
    """An epoch, or a part of one, was done."""

    event: Literal["epoch"] = "epoch"
    epoch: EpochRecord


class Beat(Line):
    """The run was alive at this time of its clock."""

    event: Literal["beat"] = "beat"
    clock_s: NonNegative


class Note(Line):
    """Something that a reader should know: a worker lost, a trial retried."""

    event: Literal["note"] = "note"
    clock_s: NonNegative
    text: str


class SessionEnded(Line):
    """The coordinator put the run down in order; ``over`` when it is done for good."""

    event: Literal["session-ended"] = "session-ended"
    clock_s: NonNegative
    reason: str
    over: bool


Event = Annotated[
    SessionBegan | Proposed | Valued | Tried | EpochDone | Beat | Note | SessionEnded, Field(discriminator="event")
]

_EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Event)


class JournalError(RunError):
    """A journal that cannot be read."""


class Journal:
    """Appends events to a file; each is on disk when ``write`` returns."""

    def __init__(self, directory: Path) -> None:
        self.path: Final = directory / NAME
        last = _drop_torn_line(self.path)
        self._last = _asked_for(directory) if last is None else _hash(last)
        self._file = self.path.open("ab")

    def write(self, event: Event) -> None:
        """Append one event, chained to the one before it, and see it to the disk."""
        line = event.model_copy(update={"after": self._last}).model_dump_json().encode()
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last = _hash(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _asked_for(directory: Path) -> str:
    """Return what the first line follows from: the hash of the run's configuration and of its seed network."""
    paths = (directory / CONFIG, directory / NETWORK)
    return _hash(b"\0".join(path.read_bytes() for path in paths if path.is_file()))


def _drop_torn_line(path: Path) -> bytes | None:
    """Cut off a last line that a killed process did not finish; return the last whole one, None where there is none."""
    if not path.exists():
        return None
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole != len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)
    return raw[:whole].splitlines()[-1] if whole else None


def _whole_lines(path: Path) -> list[bytes]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: no run can be read here: {error.strerror}") from error
    return raw[: raw.rfind(b"\n") + 1].splitlines()


def read_journal(directory: Path) -> list[Event]:
    """Return all events of a run, an unfinished last line left out; raises JournalError with the line."""
    path = directory / NAME
    events: list[Event] = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            events.append(_EVENTS.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise JournalError(
                f"{path}: line {number} is no event of a run: {where + ': ' if where else ''}{first['msg']}"
            ) from error
    return events


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """Whether the lines of a journal follow from each other.

    lines     how many there are
    unhashed  how many at the beginning carry no hash: an older version wrote them
    broken    the first line (from 1) that does not follow from the one before; None where all do
    """

    lines: int
    unhashed: int
    broken: int | None


def read_chain(directory: Path) -> Chain:
    """Follow the hashes through a journal, an unfinished last line left out.

    Raises JournalError when a line cannot be read. A last line that was changed, and lines that were taken off the end,
    leave no trace; and who can write the journal can hash all of it anew.
    """
    expected, unhashed = _asked_for(directory), 0
    lines = _whole_lines(directory / NAME)
    for number, (line, event) in enumerate(zip(lines, read_journal(directory), strict=False), start=1):
        if event.after is None and unhashed == number - 1:
            unhashed = number
        elif event.after != expected:
            return Chain(len(lines), unhashed, number)
        expected = _hash(line)
    return Chain(len(lines), unhashed, None)
