"""AccelMark's files as the one who verifies has them: what a run's record of its source is held against."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import accelmark
from accelmark.spec.catalog import SKIPPED, files_hash, is_hashed, tree_hash

_GIT_PATIENCE_S: Final = 20.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


def package() -> Path:
    """Return the folder of the AccelMark that runs."""
    return Path(accelmark.__file__).parent


@cache
def own_hash() -> str:
    """SHA-256 over its files, as a run writes it down."""
    return tree_hash(package())


@cache
def has_history() -> bool:
    """Tell whether it is a git checkout, so that earlier commits of it are at hand."""
    return _git("rev-parse", "HEAD") is not None and bool((_git("ls-files", "--", "__init__.py") or b"").strip())


@cache
def hash_at(commit: str) -> str | None:
    """SHA-256 over its files as ``commit`` has them; None where this checkout knows no such commit."""
    if not _COMMIT.fullmatch(commit):
        return None
    listed = _git("ls-tree", "-r", "-z", commit, "--", ".")
    if not listed:
        return None
    entries = [entry.split(b"\t", 1) for entry in listed.split(b"\0") if entry]
    blobs = {PurePosixPath(name.decode()): about.split()[2] for about, name in entries}
    names = sorted(name for name in blobs if is_hashed(name.name) and not SKIPPED & set(name.parts[:-1]))
    contents = _contents([blobs[name] for name in names])
    if contents is None:
        return None
    return files_hash((str(name), content) for name, content in zip(names, contents, strict=True))


def _contents(blobs: list[bytes]) -> list[bytes] | None:
    answer = _git("cat-file", "--batch", given=b"".join(blob + b"\n" for blob in blobs))
    if answer is None:
        return None
    contents, at = [], 0
    for _ in blobs:
        end = answer.index(b"\n", at)
        size = int(answer[at:end].split()[2])
        contents.append(answer[end + 1 : end + 1 + size])
        at = end + size + 2
    return contents


def _git(*arguments: str, given: bytes = b"") -> bytes | None:
    """Return git's answer, or None where there is no git, no checkout, or nothing of that name."""
    command = ["git", "-C", str(package()), *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=_GIT_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
