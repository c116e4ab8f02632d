"""Load a run: its summary and the results of its rounds, with their schema version checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from accelmark.results.schema import CaseResult, RoundResult, Summary
from accelmark.results.store.ended import SUMMARY_FILE, require_ended
from accelmark.spec.errors import RunError
from accelmark.spec.model import first_error

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
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise RunError(f"{self.where(name)}: cannot be read: {error.strerror}") from error

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in ``name``; an empty one where the file is missing or invalid."""
        try:
            loaded = from_json(self.read(name))
        except (RunError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def has(self, name: str) -> bool:
        """Return whether there is a file ``name``."""
        return (self.path / name).is_file()

    def where(self, name: str) -> str:
        """Return the place of the file, for messages."""
        return str(self.path / name)


@final
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
        """The version that the first round reports, else that of the key."""
        version = self.first.environment.started.get("framework_version") if self.first else None
        return str(version) if version else self.result.key.framework_version


def load_round(path: Path) -> RoundResult:
    """Read a ``result.json``. Raises RunError naming the file where it is unreadable or has another version."""
    return load_file(RoundResult, RunFiles(path.parent), path.name)


def load_summary(path: Path) -> Summary:
    """Read a ``summary.json``. Raises RunError naming the file where it is unreadable or has another version."""
    return load_file(Summary, RunFiles(path.parent), path.name)


def load_run(run_dir: Path, *, curves: bool = True) -> LoadedRun:
    """Load a finished run; rounds that cannot be read are listed in ``problems``.

    Without ``curves``, data for charts is omitted, which tables over many runs do not need.

    Raises RunError if there is no readable summary, or it is not of the run's end.
    """
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: is not a directory")
    files = (SUMMARY_FILE, "plan.json", "*/round*/job.json")
    if not any(file for pattern in files for file in run_dir.glob(pattern)):
        raise RunError(f"{run_dir}: is not a run (no {SUMMARY_FILE} and no plan.json)")
    require_ended(run_dir)
    return loaded_from(run_dir, None, curves=curves)


def loaded_from(path: Path, packed: RunFiles | None, *, curves: bool = True) -> LoadedRun:
    """Load a finished run from its directory ``path``, or from the files that are packed in the bundle ``path``.

    Raises RunError if there is no readable summary.
    """
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
    try:
        loaded = from_json(files.read(name), allow_inf_nan=False)
    except ValueError as error:
        raise RunError(f"{path}: is not JSON: {error}") from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version != SCHEMA_VERSION:
        found = "states no schema version" if version is None else f"has schema version {version}"
        raise RunError(f"{path}: {found}; this AccelMark reads version {SCHEMA_VERSION}")
    for field in omitted:
        loaded.pop(field, None)
    try:
        return model.model_validate(loaded)
    except ValidationError as error:
        raise RunError(f"{path}: does not follow schema version {version}: {first_error(error)}") from error
