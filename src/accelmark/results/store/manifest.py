"""``MANIFEST.sha256``: the SHA-256 of every file of a run, as ``sha256sum`` writes it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from accelmark.results.read.round_dir import REEVALUATION_PREFIX
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import run_files
from accelmark.spec.records import COORDINATOR_LOG

MANIFEST_FILE: Final = "MANIFEST.sha256"
_EXCLUDED_DIRECTORIES: Final = {"checkpoints", "__pycache__"}
"""Directories that the manifest does not cover: checkpoints are large and no figure depends on them; evaluation jobs
run later.
"""


def write_manifest(run_dir: Path) -> None:
    """Write the manifest of all files of a run."""
    _write(run_dir, {path.relative_to(run_dir).as_posix(): _sha256(path) for path in covered_files(run_dir)})


def update_manifest(run_dir: Path, *names: str) -> None:
    """Update the lines of the files ``names`` (relative to the run); other lines are kept, so that edits stay visible.

    Writes a new manifest where there is none.
    """
    manifest = run_dir / MANIFEST_FILE
    if not manifest.is_file():
        write_manifest(run_dir)
        return
    lines = manifest.read_text(encoding="utf-8").splitlines()
    hashes = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    _write(run_dir, hashes | {name: _sha256(run_dir / name) for name in names})


def _write(run_dir: Path, hashes: Mapping[str, str]) -> None:
    lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))
    write_atomic(run_dir / MANIFEST_FILE, "".join(lines))


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
        if not separator or Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(f"{path}: line {number} is not a line of a manifest")
        elif name in excluded:
            continue  # manifests of earlier versions list them
        elif not (run_dir / name).is_file():
            problems.append(f"{name}: is missing")
        elif _sha256(run_dir / name) != expected:
            problems.append(f"{name}: was changed (expected SHA-256 {expected[:12]}…)")
    found = (file.relative_to(run_dir).as_posix() for file in covered_files(run_dir))
    return problems + [f"{name}: was added (not in the manifest)" for name in sorted(found) if name not in named]


def covered_files(run_dir: Path) -> list[Path]:
    """Return the files that the manifest of a run covers, by name."""
    excluded = _excluded()
    found: list[Path] = []
    for directory, names, files in os.walk(run_dir):
        names[:] = [
            name for name in names if name not in _EXCLUDED_DIRECTORIES and not name.startswith(REEVALUATION_PREFIX)
        ]
        paths = [Path(directory, file) for file in files if not file.endswith((".pid", ".tmp", ".lock"))]
        found += (
            path
            for path in paths
            if path.name != MANIFEST_FILE
            and not (path.parent == run_dir and path.name in excluded)
            and path.is_file()
            and not path.is_symlink()
        )
    return sorted(found)


def _excluded() -> set[str]:
    """Return the files of the coordinator and its launcher, which change after the manifest is written."""
    return {COORDINATOR_LOG} | run_files()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
