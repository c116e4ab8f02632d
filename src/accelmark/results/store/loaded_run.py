"""Results on disk: read with their version checked, written beside and renamed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar, final

from pydantic import ValidationError
from pydantic_core import from_json

from accelmark.results.schema import CaseResult, RoundResult, Summary
from accelmark.spec.errors import RunError

RESULT_FILE: Final = "result.json"
SUMMARY_FILE: Final = "summary.json"
SCHEMA_VERSION: Final = 1

_DRAWN: Final = ("curves", "telemetry", "step_ms_histogram")
"""Parts of a round's result that are only drawn; they are most of it."""

R = TypeVar("R", RoundResult, Summary)


class RunFiles(Protocol):
    """The files of one run, wherever they lie."""

    def read(self, name: str) -> bytes:
        """Return the file ``name`` (relative to the run).

        Raises:
            RunError: it is not there, cannot be read, or is not as it was packed.
        """

    def has(self, name: str) -> bool:
        """Tell whether there is a file ``name``."""

    def where(self, name: str) -> str:
        """Return how a person would name the file, for a message."""


@final
@dataclass(frozen=True, slots=True)
class DirectoryFiles:
    """The files of a run directory."""

    path: Path

    def read(self, name: str) -> bytes:
        """Return the file ``name``; raises RunError where it cannot be read."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise RunError(f"{self.where(name)}: cannot be read: {error.strerror}") from error

    def has(self, name: str) -> bool:
        """Tell whether there is a file ``name``."""
        return (self.path / name).is_file()

    def where(self, name: str) -> str:
        """Return the path of the file."""
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
    """The files of a run that lies in a bundle."""

    @property
    def files(self) -> RunFiles:
        """The run's files."""
        return self.packed or DirectoryFiles(self.path)

    def rounds_of(self, case: CaseResult) -> list[RoundResult]:
        """Return the rounds of a case that could be read, in order."""
        return [self.rounds[name] for name in case.rounds if name in self.rounds]


def load_round(path: Path) -> RoundResult:
    """Read a ``result.json``. Raises RunError naming the file, and the version where that is what is wrong."""
    return _load(RoundResult, DirectoryFiles(path.parent), path.name)


def load_summary(path: Path) -> Summary:
    """Read a ``summary.json``. Raises RunError naming the file, and the version where that is what is wrong."""
    return _load(Summary, DirectoryFiles(path.parent), path.name)


def load_run(run_dir: Path, *, curves: bool = True) -> LoadedRun:
    """Read a finished run: its summary and the rounds it names; a round that cannot be read is told of.

    Without ``curves`` what is only drawn is left out: tables over many runs need no more.

    Raises:
        RunError: there is no readable summary; a run that was killed before it wrote one is said to be half-written.
    """
    summary_file = run_dir / SUMMARY_FILE
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: is not a directory of a run")
    if not summary_file.is_file():
        if (run_dir / "plan.json").is_file() or any(run_dir.glob("*/round*/job.json")):
            raise RunError(f"{run_dir}: is half-written (no {SUMMARY_FILE}): resume it, or report it to summarise it")
        raise RunError(f"{run_dir}: is not a run (it has no {SUMMARY_FILE} and no plan.json)")
    return loaded_from(run_dir, DirectoryFiles(run_dir), curves=curves)


def loaded_from(path: Path, files: RunFiles, *, curves: bool = True) -> LoadedRun:
    """Read a finished run from its files; ``path`` is what a person calls it by.

    Raises:
        RunError: there is no readable summary.
    """
    summary = _load(Summary, files, SUMMARY_FILE)
    rounds: dict[str, RoundResult] = {}
    problems: list[str] = []
    for name in (name for case in summary.cases for name in case.rounds):
        try:
            rounds[name] = _load(RoundResult, files, f"{name}/{RESULT_FILE}", () if curves else _DRAWN)
        except RunError as error:
            problems.append(str(error))
    return LoadedRun(path, summary, rounds, tuple(problems), None if isinstance(files, DirectoryFiles) else files)


def _load(model: type[R], files: RunFiles, name: str, left_out: Iterable[str] = ()) -> R:
    path = files.where(name)
    try:
        loaded = from_json(files.read(name), allow_inf_nan=False)
    except ValueError as error:
        raise RunError(f"{path}: is not JSON: {error}") from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version != SCHEMA_VERSION:
        found = "states no schema version" if version is None else f"has schema version {version}"
        raise RunError(f"{path}: {found}; this AccelMark reads version {SCHEMA_VERSION}")
    for field in left_out:
        loaded.pop(field, None)
    try:
        result = model.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path}: does not follow schema version {version}: {where}: {first['msg']}") from error
    for figure, value in _numbers(result):
        if not math.isfinite(value):  # written as 1e999: JSON has no word for it
            raise RunError(f"{path}: does not follow schema version {version}: figures.{figure}: is not finite")
    return result


def _numbers(result: RoundResult | Summary) -> Iterator[tuple[str, float]]:
    if isinstance(result, RoundResult):
        for name, figure in result.figures.items():
            if figure.value is not None:
                yield name.value, figure.value
        return
    for case in result.cases:
        for name, spread in case.figures.items():
            for value in (spread.mean, spread.stdev, *(spread.ci95 or ())):
                if value is not None:
                    yield name.value, value
