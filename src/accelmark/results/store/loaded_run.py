"""Load a run: its summary and the results of its rounds; whether it has ended."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from accelmark.results.read.round_dir import ledger_events
from accelmark.results.schema import CaseResult, RoundResult, Summary
from accelmark.spec.errors import RunError, raising
from accelmark.spec.model import json_objects

PLAN_FILE: Final = "plan.json"
SUMMARY_FILE: Final = "summary.json"
MANIFEST_FILE: Final = "MANIFEST.sha256"
HOLDER_FILE: Final = "run.pid"
"""Locked by the process that works on a run or a search."""
EVENTS_FILE: Final = "events.jsonl"
_STAGES: Final = {"run_started": False, "run_resumed": False, "run_finished": True}


def is_in_progress(directory: Path) -> bool:
    """Return whether a process has locked the directory of a run or search, also on another machine that shares it."""
    try:
        file = (directory / HOLDER_FILE).open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # NFS has the second
            return True
        except OSError:  # a file system without locks
            return False
    return False


def has_ended(run_dir: Path) -> bool:
    """Return whether a run has a summary, and has not been started or resumed since without an end."""
    if not (run_dir / SUMMARY_FILE).is_file() or is_in_progress(run_dir):
        return False
    stages = (_STAGES[kind] for event in ledger_events(run_dir) if (kind := event.get("kind")) in _STAGES)
    *_, ended = (True, *stages)
    if ended:
        return True
    try:  # where a run could not be resumed, the manifest covers the current event log
        lines = (run_dir / MANIFEST_FILE).read_text(encoding="utf-8").splitlines()
        return f"{hashlib.sha256((run_dir / EVENTS_FILE).read_bytes()).hexdigest()}  {EVENTS_FILE}" in lines
    except (OSError, UnicodeDecodeError):
        return False


def require_ended(run_dir: Path) -> None:
    """Raise RunError where the results of a run are missing, or are from before it was resumed."""
    if not (run_dir / SUMMARY_FILE).is_file() and not (run_dir / PLAN_FILE).is_file():
        raise RunError(f"{run_dir}: is not a run directory: it has neither {PLAN_FILE} nor {SUMMARY_FILE}")
    if not has_ended(run_dir):
        is_resumed = (run_dir / SUMMARY_FILE).is_file()
        what = "was resumed and has not ended again" if is_resumed else f"has no {SUMMARY_FILE}"
        state = "it is in progress" if is_in_progress(run_dir) else "it is in progress, or was interrupted"
        raise RunError(f"{run_dir}: {what}: {state}; see 'accelmark status {run_dir}'")


RESULT_FILE: Final = "result.json"
SCHEMA_VERSION: Final = 1

_CHART_FIELDS: Final = ("curves", "telemetry", "step_ms_histogram")
"""Fields of a round's result for charts only; they are most of its size."""

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run in its directory; a subclass reads them from a bundle."""

    path: Path

    def read(self, name: str) -> bytes:
        """Return the file ``name`` (relative to the run). Raises RunError where it cannot be read."""
        with raising(RunError, f"{self.where(name)}: cannot be read", OSError):
            return (self.path / name).read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in ``name``; an empty one where the file is missing or invalid."""
        with suppress(RunError):
            return next(json_objects([self.read(name)]), {})
        return {}

    def has(self, name: str) -> bool:
        """Return whether there is a file ``name``."""
        return (self.path / name).is_file()

    def where(self, name: str) -> str:
        """Return the place of the file, for messages."""
        return str(self.path / name)


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """One run, from its directory or from a bundle."""

    path: Path
    """The directory or the bundle."""
    summary: Summary
    rounds: dict[str, RoundResult]
    """Directory of the round, relative to the run -> its result."""
    problems: tuple[str, ...] = ()
    """Rounds that could not be read, by file."""
    packed: RunFiles | None = None
    """The files of a run in a bundle; None for a directory."""

    @property
    def files(self) -> RunFiles:
        """The run's files."""
        return self.packed or RunFiles(self.path)

    @property
    def cases(self) -> list[LoadedCase]:
        """The cases with their rounds, in the run's order."""
        return [LoadedCase(self, case) for case in self.summary.cases]

    @property
    def without_trials(self) -> list[LoadedCase]:
        """The cases but trials of a search for the best settings."""
        return [case for case in self.cases if case.result.role != "trial"]


class LoadedCase(NamedTuple):
    """One case of a run, with its rounds."""

    run: LoadedRun
    result: CaseResult

    @property
    def rounds(self) -> list[RoundResult]:
        """The rounds that could be read, in order."""
        return [self.run.rounds[name] for name in self.result.rounds if name in self.run.rounds]

    @property
    def succeeded(self) -> list[RoundResult]:
        """The rounds that could be read and that succeeded."""
        return [result for result in self.rounds if result.state == "succeeded"]

    @property
    def first(self) -> RoundResult | None:
        """The first round that could be read."""
        return next(iter(self.rounds), None)

    @property
    def framework_version(self) -> str | None:
        """The version that the first round reports, else the key's."""
        version = self.first.environment.started.get("framework_version") if self.first else None
        return str(version) if version else self.result.key.framework_version


def load_round(path: Path) -> RoundResult:
    """Read a ``result.json``. Raises RunError naming the file where it is unreadable or has another version."""
    return load_file(RoundResult, RunFiles(path.parent), path.name)


def load_summary(path: Path) -> Summary:
    """Read a ``summary.json``. Raises RunError naming the file where it is unreadable or has another version."""
    return load_file(Summary, RunFiles(path.parent), path.name)


def load_run(run_dir: Path, *, curves: bool = True) -> LoadedRun:
    """Load a finished run; rounds that cannot be read are listed in ``problems``."""
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: is not a directory")
    require_ended(run_dir)
    return loaded_from(run_dir, None, curves=curves)


def loaded_from(path: Path, packed: RunFiles | None, *, curves: bool = True) -> LoadedRun:
    """Load a finished run from its directory ``path``, or from the files that are packed in the bundle ``path``."""
    files = packed or RunFiles(path)
    summary = load_file(Summary, files, SUMMARY_FILE)
    rounds: dict[str, RoundResult] = {}
    problems: list[str] = []
    for name in (name for case in summary.cases for name in case.rounds):
        try:
            rounds[name] = load_file(RoundResult, files, f"{name}/{RESULT_FILE}", () if curves else _CHART_FIELDS)
        except RunError as error:
            problems.append(str(error))
    return LoadedRun(path, summary, rounds, tuple(problems), packed)


def load_file(model: type[M], files: RunFiles, name: str, omitted: Iterable[str] = ()) -> M:
    """Read a file with a schema version, without the fields ``omitted``; raises RunError where that fails."""
    path = files.where(name)
    with raising(RunError, f"{path}: is not JSON", ValueError):
        loaded = from_json(files.read(name), allow_inf_nan=False)
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version != SCHEMA_VERSION:
        stated = "states no schema version" if version is None else f"has schema version {version}"
        raise RunError(f"{path}: {stated}; this AccelMark reads version {SCHEMA_VERSION}")
    for field in omitted:
        loaded.pop(field, None)
    with raising(RunError, f"{path}: does not follow schema version {version}", ValidationError):
        return model.model_validate(loaded)
