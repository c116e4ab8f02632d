"""The durable record of a run: one line an event, flushed to disk before anything else happens.

A run is what its journal says. A killed coordinator leaves a journal from which another goes on.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from accelmark.automl.records import EpochRecord, NonNegative, Record, TrialRecord
from accelmark.automl.search import Individual, Standing
from accelmark.spec.errors import RunError

NAME: Final = "journal.jsonl"


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


class SessionBegan(Record):
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


class Proposed(Record):
    """A network joined the family, or its hyperparameters were written into it."""

    event: Literal["proposed"] = "proposed"
    individual: Individual
    searcher: str
    seconds: float | None = None


class Valued(Record):
    """A network's trial gave it a value, or gave nothing."""

    event: Literal["valued"] = "valued"
    individual: int
    standing: Standing
    value: float | None


class Tried(Record):
    """A trial began, or what is known of it changed; the latest of one trial and attempt holds."""

    event: Literal["trial"] = "trial"
    trial: TrialRecord


class EpochDone(Record):
    """An epoch, or a part of one, was done."""

    event: Literal["epoch"] = "epoch"
    epoch: EpochRecord


class Beat(Record):
    """The run was alive at this time of its clock."""

    event: Literal["beat"] = "beat"
    clock_s: NonNegative


class Note(Record):
    """Something that a reader should know: a worker lost, a trial retried."""

    event: Literal["note"] = "note"
    clock_s: NonNegative
    text: str


class SessionEnded(Record):
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
        _drop_torn_line(self.path)
        self._file = self.path.open("ab")

    def write(self, event: Event) -> None:
        """Append one event and see it to the disk."""
        self._file.write(event.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed process did not finish."""
    if not path.exists():
        return
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole != len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)


def read_journal(directory: Path) -> list[Event]:
    """Return all events of a run, an unfinished last line left out; raises JournalError with the line."""
    path = directory / NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: no run can be read here: {error.strerror}") from error
    events: list[Event] = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            events.append(_EVENTS.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise JournalError(
                f"{path}: line {number} is no event of a run: {where + ': ' if where else ''}{first['msg']}"
            ) from error
    return events
