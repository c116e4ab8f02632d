"""Find and load runs, bundles and AutoML searches below the paths that a user names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from accelmark.results.rounds.search import is_search, load_search
from accelmark.results.store.bundle import SUFFIX, bundle_edits, edits, is_bundle, load_bundle
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun, load_run
from accelmark.spec.errors import RequestError, RunError


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Load every run at or below ``paths``, in their order; the second list has a message for each unreadable one.

    Raises RequestError if a path does not exist, or is a file but not a bundle.
    """
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        try:
            there, is_other_file = path.exists(), path.is_file() and not is_bundle(path)
        except OSError as error:
            raise RequestError(f"{written(path)}: cannot be read: {error.strerror}") from error
        if not there:
            raise RequestError(f"{path}: no such run, bundle or directory of runs")
        if is_other_file:
            raise RequestError(f"{path}: is not a bundle; name a run, a bundle or a directory of them")
        places, unread = find_sources(path)
        found, bad = load_runs(places)
        runs += found
        problems += unread + bad if found or bad or unread else [f"{path}: has no runs"]
    return runs, problems


def find_sources(path: Path) -> tuple[list[Path], list[str]]:
    """Return ``path`` itself if it is a run or a bundle, else every run and bundle below it, by name.

    A file with a bundle's suffix is included even if it is not one, so that loading it reports it. The second list has
    a message for each unreadable directory and each name that is not UTF-8.
    """
    if written(path) != str(path):
        return [], [f"{written(path)}: the name is not UTF-8: rename it"]
    try:
        if path.is_file() or is_search(path) or any((path / name).is_file() for name in (SUMMARY_FILE, "plan.json")):
            return [path], []
        entries = sorted((entry, entry.is_dir()) for entry in path.iterdir() if not entry.is_symlink())
    except OSError as error:
        return [], [f"{path}: cannot be read: {error.strerror}"]
    places: list[Path] = []
    problems: list[str] = []
    for entry, is_directory in entries:
        if is_directory or entry.name.endswith(SUFFIX) or (entry.suffix == ".tar" and is_bundle(entry)):
            found, unread = find_sources(entry)
            places += found
            problems += unread
    return places, problems


def written(path: Path) -> str:
    """Return a path as text with bytes that are not UTF-8 escaped."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def load_source(path: Path, *, curves: bool = True) -> LoadedRun:
    """Load one run, search or bundle, with or without data for charts. Raises RunError where it cannot be read."""
    try:
        if path.is_file():
            return _marked(load_bundle(path, curves=curves), bundle_edits(path))
        return load_search(path) if is_search(path) else _marked(load_run(path, curves=curves), edits(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


def _marked(run: LoadedRun, problems: Sequence[str]) -> LoadedRun:
    """Return a run with the mark ``edited`` on all cases if there are ``problems`` with its files."""
    if not problems:
        return run
    cases = tuple(case.model_copy(update={"marks": (*case.marks, "edited")}) for case in run.summary.cases)
    summary = run.summary.model_copy(update={"cases": cases})
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    what = f"{run.path}: {problems[0]}{more}: see 'accelmark verify {run.path}'"
    return replace(run, summary=summary, problems=(*run.problems, what))


def load_runs(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Load the figures of every run of ``paths``; the second list names those that cannot be read."""
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
