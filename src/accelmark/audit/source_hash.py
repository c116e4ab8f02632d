"""Hash AccelMark's own files, as installed and as a git commit has them, to compare with a run's source record."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import accelmark
from accelmark.spec.plugins.catalog import SKIPPED, files_hash, is_hashed, tree_hash

_GIT_TIMEOUT_S: Final = 20.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


def package() -> Path:
    """Return the folder of the running AccelMark."""
    return Path(accelmark.__file__).parent


@cache
def own_hash() -> str:
    """SHA-256 over the package's files, as a run records it."""
    return tree_hash(package())


@cache
def has_history() -> bool:
    """Return whether the package is in a git checkout."""
    return _git("rev-parse", "HEAD") is not None and bool((_git("ls-files", "--", "__init__.py") or b"").strip())


@cache
def hash_at(commit: str, folder: str = ".") -> str | None:
    """SHA-256 over the files that ``commit`` has in a folder of the package; None where it is not in this checkout."""
    if not _COMMIT.fullmatch(commit):
        return None
    listed = _git("ls-tree", "-r", "-z", commit, "--", folder)
    if not listed:
        return None
    entries = [entry.split(b"\t", 1) for entry in listed.split(b"\0") if entry]
    blobs = {PurePosixPath(name.decode()).relative_to(folder): about.split()[2] for about, name in entries}
    names = sorted(name for name in blobs if is_hashed(name.name) and not SKIPPED & set(name.parts[:-1]))
    contents = _contents([blobs[name] for name in names])
    if contents is None:
        return None
    return files_hash((str(name), content) for name, content in zip(names, contents, strict=True))


def _contents(blobs: list[bytes]) -> list[bytes] | None:
    output = _git("cat-file", "--batch", stdin=b"".join(blob + b"\n" for blob in blobs))
    if output is None:
        return None
    contents, offset = [], 0
    for _ in blobs:
        end = output.index(b"\n", offset)
        size = int(output[offset:end].split()[2])
        contents.append(output[end + 1 : end + 1 + size])
        offset = end + size + 2
    return contents


def _git(*arguments: str, stdin: bytes = b"") -> bytes | None:
    """Return git's output, or None where git, the checkout or the object is missing."""
    command = ["git", "-C", str(package()), *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
