"""``MANIFEST.sha256``: the SHA-256 of every file of a run, as ``sha256sum`` writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from accelmark.results.read.reevaluation import PREFIX as REEVALUATION_PREFIX
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import run_files
from accelmark.spec.records import COORDINATOR_LOG

MANIFEST_FILE: Final = "MANIFEST.sha256"
_EXCLUDED_DIRECTORIES: Final = {"checkpoints", "__pycache__"}
"""Directories that the manifest does not cover: checkpoints are large and no figure depends on them; evaluation jobs
run later.
"""


def write_manifest(run_dir: Path) -> Path:
    """Write the manifest of all files of a run; return its path."""
    lines = [f"{_sha256(path)}  {path.relative_to(run_dir).as_posix()}\n" for path in sorted(_files(run_dir))]
    manifest = run_dir / MANIFEST_FILE
    write_atomic(manifest, "".join(lines))
    return manifest


def update_manifest(run_dir: Path, *names: str) -> None:
    """Update the lines of the files ``names`` (relative to the run); other lines are kept, so that edits stay visible.

    Writes a new manifest where there is none.
    """
    manifest = run_dir / MANIFEST_FILE
    if not manifest.is_file():
        write_manifest(run_dir)
        return
    kept = [line for line in manifest.read_text(encoding="utf-8").splitlines() if line.partition("  ")[2] not in names]
    lines = [*kept, *(f"{_sha256(run_dir / name)}  {name}" for name in names)]
    write_atomic(manifest, "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.partition("  ")[2])))


def check_manifest(run_dir: Path) -> list[str]:
    """Return a message for each file that is missing, was changed, or is not in the manifest.

    Raises RunError if the manifest is missing or unreadable.
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
            problems.append(f"{path}: line {number} is not a line of a manifest")
        elif name in excluded:
            continue  # manifests of earlier versions list them
        elif not file.is_file():
            problems.append(f"{name}: is missing")
        elif _sha256(file) != expected:
            problems.append(f"{name}: was changed (expected SHA-256 {expected[:12]}…)")
    found = sorted(file.relative_to(run_dir).as_posix() for file in _files(run_dir))
    problems += [f"{name}: was added (not in the manifest)" for name in found if name not in named]
    return problems


def covered_files(run_dir: Path) -> list[Path]:
    """Return the files that the manifest of a run covers, by name."""
    return sorted(_files(run_dir))


def _excluded() -> set[str]:
    """Return the files of the coordinator and its launcher, which change after the manifest is written."""
    return {COORDINATOR_LOG} | run_files()


def _files(run_dir: Path) -> Iterator[Path]:
    excluded = _excluded()
    for directory, names, files in os.walk(run_dir):
        names[:] = [
            name for name in names if name not in _EXCLUDED_DIRECTORIES and not name.startswith(REEVALUATION_PREFIX)
        ]
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
