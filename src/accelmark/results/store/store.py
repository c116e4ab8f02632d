"""Results on disk: read with their version checked, written beside and renamed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar, final

from pydantic import ValidationError
from pydantic_core import from_json

from accelmark.results.schema import CaseResult, RoundResult, Summary
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import RunError
from accelmark.spec.evidence import COORDINATOR_LOG
from accelmark.spec.launcher import run_files

RESULT_FILE: Final = "result.json"
SUMMARY_FILE: Final = "summary.json"
MANIFEST_FILE: Final = "MANIFEST.sha256"
SCHEMA_VERSION: Final = 1

_LEFT_OUT: Final = {"checkpoints", "__pycache__"}
"""Directories the manifest does not cover: checkpoints are large, and no figure comes from them."""

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


def write_manifest(run_dir: Path) -> Path:
    """Write ``MANIFEST.sha256`` over all files of a run, as ``sha256sum`` would; return its path."""
    lines = [f"{_sha256(path)}  {path.relative_to(run_dir).as_posix()}\n" for path in sorted(_files(run_dir))]
    manifest = run_dir / MANIFEST_FILE
    write_atomic(manifest, "".join(lines))
    return manifest


def update_manifest(run_dir: Path, *names: str) -> None:
    """Take the files ``names`` (relative to the run) into the manifest as they are now; other lines stay as they are.

    So a page that is written anew does not vouch for a log that was edited meanwhile. Without a manifest, one is made.
    """
    manifest = run_dir / MANIFEST_FILE
    if not manifest.is_file():
        write_manifest(run_dir)
        return
    kept = [line for line in manifest.read_text(encoding="utf-8").splitlines() if line.partition("  ")[2] not in names]
    lines = [*kept, *(f"{_sha256(run_dir / name)}  {name}" for name in names)]
    write_atomic(manifest, "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.partition("  ")[2])))


def check_manifest(run_dir: Path) -> list[str]:
    """Return one sentence for each file that the manifest names and that is gone or was changed, or that it lacks.

    Raises:
        RunError: there is no readable manifest.
    """
    path = run_dir / MANIFEST_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    problems: list[str] = []
    named: set[str] = set()
    excluded = _excluded()
    for number, line in enumerate(lines, start=1):
        expected, separator, name = line.partition("  ")
        named.add(name)
        file = run_dir / name
        if not separator or Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(f"{path}: line {number} is no line of a manifest")
        elif name in excluded:
            continue  # a manifest that was written before these were excluded
        elif not file.is_file():
            problems.append(f"{name}: is missing")
        elif _sha256(file) != expected:
            problems.append(f"{name}: was changed (its SHA-256 is not {expected[:12]}…)")
    found = sorted(file.relative_to(run_dir).as_posix() for file in _files(run_dir))
    problems += [f"{name}: was added (the manifest does not name it)" for name in found if name not in named]
    return problems


def covered_files(run_dir: Path) -> list[Path]:
    """Return the files of a run that its manifest covers, by name."""
    return sorted(_files(run_dir))


def _excluded() -> set[str]:
    """Return files of the coordinator and its launcher, which change after the manifest is written."""
    return {COORDINATOR_LOG} | run_files()


def _files(run_dir: Path) -> Iterator[Path]:
    excluded = _excluded()
    for directory, names, files in os.walk(run_dir):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        for file in files:
            if Path(directory) == run_dir and file in excluded:
                continue
            if file != MANIFEST_FILE and not file.endswith((".pid", ".tmp", ".lock")):
                path = Path(directory, file)
                if path.is_file() and not path.is_symlink():
                    yield path


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


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
