"""Where fetched data is kept, and how processes that want the same data keep out of each other's way."""

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
    # The XDG specification: a relative path in the variable is to be ignored.
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return home / "accelmark"


def cached_place(spec: DatasetSpec) -> Path:
    """Return the directory in the cache that holds ``spec`` once it was fetched; its name tells the content."""
    return cache_directory() / "datasets" / f"{spec.name}-{spec.fingerprint[:12]}"


@contextmanager
def locked(place: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the lock of ``place`` (a file beside it), waiting for a process that holds it now.

    The lock ends with the process, however that ends.

    Raises:
        DataError: the other process did not end within an hour.
    """
    with place.with_name(f"{place.name}.lock").open("ab") as stream:
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
                    progress(f"waiting for another process that fetches {place.name}", 0, None)
                time.sleep(INTERVAL_S)
        yield


@contextmanager
def beside(place: Path) -> Iterator[Path]:
    """Give an empty directory next to ``place`` that is gone afterwards, whatever happened; hold the lock meanwhile.

    What a killed process left is removed first.
    """
    for left in place.parent.glob(f".{place.name}.*{_PART}"):
        shutil.rmtree(left)
    part = place.with_name(f".{place.name}.{os.getpid()}{_PART}")
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_in_place(made: Path, place: Path) -> None:
    """Move the directory ``made`` to ``place`` in one step; what was there goes into the directory around ``made``."""
    if place.exists():
        place.rename(made.with_name(f"{made.name}-replaced"))
    made.rename(place)
