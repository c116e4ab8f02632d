"""The directory of a search: configuration, seed network, journal, weights, lock and stop mark; and the search's state.

The journal has one line per event, flushed to disk before anything else happens; the state is computed from it only.
Each line has the SHA-256 of the line before, the first line that of configuration and seed network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from accelmark.automl.config import AutomlConfig
from accelmark.automl.model.graph import Network, Node, load_network
from accelmark.automl.model.weights import Array, Weights
from accelmark.automl.records import FAILURES, EpochRecord, Individual, NonNegative, Splits, Totals, TrialRecord
from accelmark.datasets.images import read_weights
from accelmark.results.rounds.search import CONFIG_FILE, SEARCH_REPORT, SearchSummary
from accelmark.results.store.loaded_run import is_in_progress
from accelmark.run.record.directory import default_path, lock_directory
from accelmark.spec.errors import RequestError, RunError, raising
from accelmark.spec.model import Spec

JOURNAL_FILE: Final = "journal.jsonl"
NETWORK_FILE: Final = "network.json"
STATUS_FILE: Final = "status.json"


class _Event(Spec):
    after: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the line before; set when the event is written."""


class SessionBegan(_Event):
    """A controller started or resumed the run; ``monotonic_s`` is the clock of telemetry."""

    event: Literal["session-began"] = "session-began"
    at: str
    clock_s: NonNegative
    monotonic_s: float
    host: str
    pid: int
    experiment: str
    dataset_fingerprint: str
    dataset_identity: str
    splits: Splits
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
    status: Literal["observed", "lost"]
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


class Remark(_Event):
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
    SessionBegan | Proposed | Valued | TrialEvent | EpochEvent | Heartbeat | Remark | SessionEnded,
    Field(discriminator="event"),
]

_EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Event)


def _writing(path: Path) -> AbstractContextManager[None]:
    return raising(RunError, f"{path}: cannot be written; make room and resume the search", OSError)


class Journal:
    """Appends events to a file; each is on disk when ``write`` returns, or with ``sync`` False at the next sync."""

    def __init__(self, directory: Path) -> None:
        path = directory / JOURNAL_FILE
        self._last, length = _sha256_of_request(directory), 0
        for line in _complete_lines(path):
            self._last, length = sha256(line).hexdigest(), length + len(line) + 1
        self._file = path.open("ab")
        self._file.truncate(length)  # a kill may have left an incomplete line

    def write(self, event: Event, *, sync: bool = True) -> None:
        """Append an event with the hash of the one before."""
        line = event.model_copy(update={"after": self._last}).model_dump_json().encode()
        with _writing(Path(self._file.name)):
            self._file.write(line + b"\n")
        self._last = sha256(line).hexdigest()
        if sync:
            self.sync()

    def sync(self) -> None:
        """Write everything to disk; raises RunError where that is not possible, as on a full disk."""
        with _writing(Path(self._file.name)):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sha256_of_request(directory: Path) -> str:
    paths = (directory / CONFIG_FILE, directory / NETWORK_FILE)
    return sha256(b"\0".join(path.read_bytes() for path in paths if path.is_file())).hexdigest()


def _complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal without an incomplete last one; none where there is no journal yet."""
    with raising(RunError, f"{path}: cannot be read", OSError), suppress(FileNotFoundError), path.open("rb") as file:
        yield from (line[:-1] for line in file if line.endswith(b"\n"))


def read_journal(directory: Path) -> Iterator[Event]:
    """Yield the events of a search without an incomplete last line; raises RunError with the line of an invalid one."""
    path = directory / JOURNAL_FILE
    for number, line in enumerate(_complete_lines(path), start=1):
        with raising(RunError, f"{path}: line {number} is not a valid event", ValidationError):
            yield _EVENTS.validate_json(line)


def first_broken_line(directory: Path, events: Iterable[Event]) -> int | None:
    """Return the first line (from 1) whose hash is not that of the line before; no change of the last line shows."""
    expected = _sha256_of_request(directory)
    lines = _complete_lines(directory / JOURNAL_FILE)
    for number, (line, event) in enumerate(zip(lines, events, strict=False), start=1):
        if event.after != expected:
            return number
        expected = sha256(line).hexdigest()
    return None


Attempt = tuple[int, int]
"""Trial, and attempt at it from 1."""


@dataclass
class SearchState:
    """The state of a search after some events; without ``keeps_epochs``, totals only of attempts that have ended."""

    keeps_epochs: bool = True
    attempts: dict[Attempt, TrialRecord] = field(default_factory=dict)
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    """The latest attempt of every trial."""
    epochs: dict[Attempt, list[EpochRecord]] = field(default_factory=dict)
    totals: dict[Attempt, Totals] = field(default_factory=dict)
    individuals: list[Individual] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    clock_s: float = 0.0
    sessions: list[SessionBegan] = field(default_factory=list)
    ended: SessionEnded | None = None
    best_individual: int | None = None
    _best: tuple[float, int] = (-1.0, 0)
    _nodes: dict[Node, Node] = field(default_factory=dict, repr=False)
    """Equal nodes of all networks are one object: a search has many networks that differ in few nodes."""

    @staticmethod
    def of(events: Iterable[Event], *, keeps_epochs: bool = True) -> SearchState:
        """Return the state after all events; raises RunError with the line of one that contradicts earlier ones."""
        state = SearchState(keeps_epochs)
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
                nodes = (self._nodes.setdefault(node, node) for node in one.network.nodes)
                shared = one.model_copy(update={"network": one.network.with_nodes(nodes)})
                self.individuals[one.id : one.id + 1] = [shared]
            case Valued(individual=number):
                if not 0 <= number < known:
                    raise RunError(f"the value of network {number}, which was not proposed before")
                changes = {"status": event.status, "value": event.value}
                self.individuals[number] = self.individuals[number].model_copy(update=changes)
            case TrialEvent(trial=record):
                if record.individual >= known:
                    what = f"trial {record.trial} of network {record.individual}"
                    raise RunError(f"{what}, which was not proposed before")
                key, clock_s = (record.trial, record.attempt), record.ended_s or record.started_s
                self.attempts[key] = record
                totals = self.totals.setdefault(key, Totals())
                if record.trial not in self.trials or self.trials[record.trial].attempt <= record.attempt:
                    self.trials[record.trial] = record
                if record.status != "running" and not self.keeps_epochs:
                    self.epochs.pop(key, None)
                reached = totals.accuracy if totals.accuracy is not None else -1.0, -record.trial
                if record.status not in ("running", *FAILURES) and reached > self._best:
                    self.best_individual, self._best = record.individual, reached
            case EpochEvent(epoch=epoch):
                key, clock_s = (epoch.trial, epoch.attempt), epoch.ended_s
                if key not in self.attempts:
                    raise RunError(f"an epoch of trial {key[0]}, attempt {key[1]}, which was not started before")
                self.totals[key].add(epoch)
                if self.keeps_epochs or self.attempts[key].status == "running":
                    self.epochs.setdefault(key, []).append(epoch)
            case Remark():
                self.notes.append(event)  # notes do not advance the run's clock
            case Heartbeat(clock_s=clock_s):
                pass
            case SessionEnded(clock_s=clock_s):
                self.ended = event
        self.clock_s = max(self.clock_s, clock_s)

    @property
    def interruptions(self) -> int:
        """Number of times that the run was resumed."""
        return max(0, len(self.sessions) - 1)

    def epochs_of(self, record: TrialRecord) -> list[EpochRecord]:
        """Return the epochs of one attempt."""
        return self.epochs.get((record.trial, record.attempt), [])

    def totals_of(self, record: TrialRecord) -> Totals:
        """Return the totals of one attempt's epochs."""
        return self.totals[record.trial, record.attempt]

    def useful(self) -> Iterator[TrialRecord]:
        """Yield the attempts whose epochs are scored: those that gave a result or are running."""
        return (record for record in self.attempts.values() if record.status not in FAILURES)


class SearchDirectory:
    """The record of a search: any process may read it, one controller at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    @staticmethod
    def create(root: Path, config: AutomlConfig, network: Network) -> SearchDirectory:
        """Make the directory of a new search below ``root``, named after the time (UTC) and the configuration."""
        path = default_path(config.name, datetime.now(UTC), root)
        path.mkdir(parents=True)
        (path / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (path / NETWORK_FILE).write_text(network.to_json(), encoding="utf-8")
        return SearchDirectory(path)

    @property
    def name(self) -> str:
        """The directory's name, also that of the search's own study."""
        return self.path.resolve().name

    @property
    def stop_mark(self) -> Path:
        """File whose existence asks the running controller to stop."""
        return self.path / "stop"

    def telemetry(self, session: int) -> Path:
        """Return the directory of a session's telemetry; sessions are numbered from 1."""
        return self.path / "telemetry" / f"session{session}"

    def config(self) -> AutomlConfig:
        """Return the configuration; raises RunError where this is not a search."""
        with raising(RunError, f"{self.path}: is not the directory of a search", OSError, ValidationError):
            return AutomlConfig.model_validate_json((self.path / CONFIG_FILE).read_text(encoding="utf-8"))

    def network(self) -> Network:
        """Return the seed network."""
        return load_network(self.path / NETWORK_FILE)

    def state(self, *, keeps_epochs: bool = True) -> SearchState:
        """Return the state that the journal gives; the initial state where there is none yet."""
        return SearchState.of(read_journal(self.path), keeps_epochs=keeps_epochs)

    @property
    def journal_bytes(self) -> int:
        """Length of the journal."""
        path = self.path / JOURNAL_FILE
        return path.stat().st_size if path.is_file() else 0

    def status(self) -> SearchSummary | None:
        """Return the figures that the controller or the report wrote last; None where the journal has gone on since."""
        runs = self.is_running()
        for name in (STATUS_FILE,) if runs else (SEARCH_REPORT, STATUS_FILE):
            with suppress(OSError, ValidationError):
                found = SearchSummary.model_validate_json((self.path / name).read_bytes())
                if runs or (found.status != "running" and found.journal_bytes == self.journal_bytes):
                    return found
        return None

    def is_running(self) -> bool:
        """Return whether a controller has locked the search."""
        return is_in_progress(self.path)

    def held(self) -> AbstractContextManager[None]:
        """Lock the search; raises RequestError where another controller has locked it."""
        return lock_directory(self.path, "accelmark automl")

    def _weights(self, individual: int) -> Path:
        return self.path / "weights" / f"{individual}.npz"

    def save_weights(self, individual: int, weights: Weights) -> None:
        """Write an individual's weights; a killed process leaves no incomplete file under their name."""
        path = self._weights(individual)
        part = path.with_suffix(".part.npz")
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
            np.savez(part, **weights)  # type: ignore[arg-type]
            part.replace(path)

    def load_weights(self, individual: int) -> dict[str, Array] | None:
        """Return an individual's weights; None where it has none."""
        path = self._weights(individual)
        return read_weights(path) if path.is_file() else None


def find_search(name: str, root: Path) -> SearchDirectory:
    """Return a search by its directory, by its name below ``root``, or the newest there for ``latest``."""
    for path in (Path(name), root / name):
        if (path / CONFIG_FILE).is_file():
            return SearchDirectory(path)
    found = sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}"))
    if name == "latest" and found:
        return SearchDirectory(found[-1])
    raise RequestError(f"there is no search in {name!r} or {root / name}")
