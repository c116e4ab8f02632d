"""The cache of fetched data, shared by processes through a lock per data set."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.datasets.progress import INTERVAL_S, Progress
from accelmark.datasets.spec import DatasetSpec
from accelmark.spec.errors import DataError

CACHE_VARIABLE: Final = "ACCELMARK_CACHE"
LOCK_TIMEOUT_S: Final = 3600.0
_PART: Final = ".part"


def cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return ``$ACCELMARK_CACHE``, else ``$XDG_CACHE_HOME/accelmark``, else ``~/.cache/accelmark``."""
    variables = os.environ if environment is None else environment
    if variables.get(CACHE_VARIABLE):
        return Path(variables[CACHE_VARIABLE]).expanduser().absolute()
    base = variables.get("XDG_CACHE_HOME")
    # The XDG specification: ignore a relative path in the variable.
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return home / "accelmark"


def cached_path(spec: DatasetSpec) -> Path:
    """Return the directory of ``spec`` in the cache, named by its fingerprint."""
    return cache_directory() / "datasets" / f"{spec.name}-{spec.fingerprint[:12]}"


@contextmanager
def locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the lock file of ``path``, after waiting for a process that holds it.

    The lock ends with the process.

    Raises:
        DataError: the other process held it for an hour.
    """
    with path.with_name(f"{path.name}.lock").open("ab") as stream:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    what = f"another process has held {stream.name} for an hour"
                    raise DataError(f"{what}; end it and try again") from None
                if progress is not None:
                    progress(f"waiting for another process that fetches {path.name}", 0, None)
                time.sleep(INTERVAL_S)
        yield


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Create an empty directory next to ``path`` and remove it afterwards; hold the lock of ``path`` meanwhile.

    Directories of killed processes are removed first.
    """
    for left in path.parent.glob(f".{path.name}.*{_PART}"):
        shutil.rmtree(left)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def install(fetched: Path, path: Path) -> None:
    """Rename ``fetched`` to ``path``; a directory that exists there is moved next to ``fetched`` first."""
    if path.exists():
        path.rename(fetched.with_name(f"{fetched.name}-replaced"))
    fetched.rename(path)
