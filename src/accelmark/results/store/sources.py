"""Runs from wherever people point: a run, a bundle of one, a search, or a directory of all of these."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from accelmark.results.rounds.search import is_search, load_search
from accelmark.results.store.bundle import SUFFIX, is_bundle, load_bundle
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun, load_run
from accelmark.spec.errors import RequestError, RunError


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Read every run that ``paths`` stand for, in their order; a directory stands for each run and bundle below it.

    Returns:
        The runs, and one sentence for each run or directory that could not be read.

    Raises:
        RequestError: a path is not there, or is a file that is no bundle.
    """
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        try:
            there, is_other_file = path.exists(), path.is_file() and not is_bundle(path)
        except OSError as error:
            raise RequestError(f"{written(path)}: cannot be read: {error.strerror}") from error
        if not there:
            raise RequestError(f"{path}: there is no such run, bundle or directory of runs")
        if is_other_file:
            raise RequestError(f"{path}: is no bundle of a run; name a run, a bundle or a directory of them")
        places, unread = find_sources(path)
        found, bad = load_runs(places)
        if not found and not bad and not unread:
            bad = [f"{path}: holds no run"]
        runs += found
        problems += unread + bad
    return runs, problems


def find_sources(path: Path) -> tuple[list[Path], list[str]]:
    """Find ``path`` itself if it is a run or a bundle, else every run and bundle below it, by name.

    Runs hold no runs. A file that is called as bundles are but is none is among them too, so that it is named as bad.

    Returns:
        The runs and bundles, and one sentence for each directory that cannot be read and each name that is not text.
    """
    places: list[Path] = []
    problems: list[str] = []
    _find(path, places, problems)
    return places, problems


def _find(path: Path, places: list[Path], problems: list[str]) -> None:
    if written(path) != str(path):
        problems.append(f"{written(path)}: its name is not UTF-8: rename it")
        return
    try:
        if path.is_file() or is_search(path) or any((path / name).is_file() for name in (SUMMARY_FILE, "plan.json")):
            places.append(path)
            return
        entries = sorted((entry, entry.is_dir()) for entry in path.iterdir() if not entry.is_symlink())
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    for entry, is_directory in entries:
        if is_directory or entry.name.endswith(SUFFIX) or (entry.suffix == ".tar" and is_bundle(entry)):
            _find(entry, places, problems)


def written(path: Path) -> str:
    """Return a path as text; bytes of it that are no UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def load_source(path: Path, *, curves: bool = True) -> LoadedRun:
    """Read one run, search or bundle, with what is drawn of it or without. Raises RunError where it cannot be."""
    try:
        if path.is_file():
            return load_bundle(path, curves=curves)
        return load_search(path) if is_search(path) else load_run(path, curves=curves)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


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
