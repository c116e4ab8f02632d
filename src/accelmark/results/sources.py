"""Runs from wherever people point: a run, a bundle of one, a search, or a directory of all of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from accelmark.results.bundled import SUFFIX, is_bundle, load_bundle
from accelmark.results.search import is_search, load_search
from accelmark.results.store import SUMMARY_FILE, LoadedRun, load_run
from accelmark.spec.errors import RequestError, RunError


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Read every run that ``paths`` stand for, in their order; a directory stands for each run and bundle below it.

    Returns:
        The runs, and one sentence for each that could not be read.

    Raises:
        RequestError: a path is not there, or is a file that is no bundle.
    """
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        if not path.exists():
            raise RequestError(f"{path}: there is no such run, bundle or directory of runs")
        if path.is_file() and not is_bundle(path):
            raise RequestError(f"{path}: is no bundle of a run; name a run, a bundle or a directory of them")
        found, bad = load_runs(find_sources(path))
        if not found and not bad:
            bad = [f"{path}: holds no run"]
        runs += found
        problems += bad
    return runs, problems


def find_sources(path: Path) -> Iterator[Path]:
    """Yield ``path`` itself if it is a run or a bundle, else every run and bundle below it, by name.

    Runs hold no runs. A file that is called as bundles are but is none is yielded too, so that it is named as bad.

    Raises:
        RunError: the directory cannot be read.
    """
    if path.is_file() or is_search(path) or any((path / name).is_file() for name in (SUMMARY_FILE, "plan.json")):
        yield path
        return
    try:
        below = sorted(entry for entry in path.iterdir() if not entry.is_symlink())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    for entry in below:
        if entry.is_dir():
            yield from find_sources(entry)
        elif entry.name.endswith(SUFFIX) or (entry.suffix == ".tar" and is_bundle(entry)):
            yield entry


def load_source(path: Path, *, curves: bool = True) -> LoadedRun:
    """Read one run, search or bundle, with what is drawn of it or without. Raises RunError where it cannot be."""
    if path.is_file():
        return load_bundle(path, curves=curves)
    return load_search(path) if is_search(path) else load_run(path, curves=curves)


def load_runs(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Read the figures of every run of ``paths``; those that cannot be read are named in the second list."""
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        try:
            run = load_source(path, curves=False)
        except RunError as error:
            problems.append(str(error))
            continue
        runs.append(run)
        problems += run.problems
    return runs, problems
