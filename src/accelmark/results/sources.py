"""Find and load runs, bundles, AutoML searches and published results below the paths that a user names."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from accelmark.results.rounds.search import is_search, load_search
from accelmark.results.schema import CaseResult, Spread, Summary
from accelmark.results.store.bundle import SUFFIX, bundle_edits, edits, is_bundle, load_bundle
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun, load_run
from accelmark.spec.errors import UNREADABLE, RequestError, RunError, SpecError, raising
from accelmark.spec.model import read_yaml

_RECORDS: Final = "records"
_NOTES: Final = "notes.yaml"
"""Published results: ``records/NAME.json``, an excerpt of a result.json, and notes that complete each NAME."""


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Load every run at or below ``paths``, in their order; the second list has a message for each unreadable one.

    A run that a path names is always kept. Below a directory, copies (bundles, exports) are left out.

    Raises RequestError if a path does not exist, or is a file but not a bundle.
    """
    runs: list[LoadedRun] = []
    named: set[Path] = set()
    problems: list[str] = []
    for path in paths:
        if not path.exists() or (path.is_file() and not is_bundle(path)):
            raise RequestError(f"{path}: is no run, bundle or directory of runs")
        places, unread = find_sources(path)
        opened: list[LoadedRun] = []
        for place in places:
            try:
                opened.append(load_source(place, curves=False))
            except RunError as error:
                unread.append(str(error))
        named.update(run.path for run in opened if run.path == path)
        runs += opened
        problems += unread if opened or unread else [f"{path}: has no runs"]
    kept, unreadable = without_copies(runs, named)
    return kept, problems + unreadable


def find_sources(path: Path) -> tuple[list[Path], list[str]]:
    """Return ``path`` if it is a run or bundle, else every run, bundle and published result below it, and problems."""
    try:
        if path.is_file() or is_search(path) or any((path / name).is_file() for name in (SUMMARY_FILE, "plan.json")):
            return [path], []
        entries = sorted((entry, entry.is_dir()) for entry in path.iterdir() if not entry.is_symlink())
    except OSError as error:
        return [], [f"{path}: cannot be read: {error.strerror}"]
    places: list[Path] = []
    problems: list[str] = []
    for entry, is_directory in entries:
        if is_directory and entry.name == _RECORDS and (path / _NOTES).is_file():
            places += sorted(entry.glob("*.json"))
        elif is_directory or entry.name.endswith(SUFFIX) or (entry.suffix == ".tar" and is_bundle(entry)):
            below, unread = find_sources(entry)
            places += below
            problems += unread
    return places, problems


def load_source(path: Path, *, curves: bool = True) -> LoadedRun:
    """Load one run, search or bundle, with or without data for charts. Raises RunError where it cannot be read."""
    with raising(RunError, f"{path}: cannot be read", OSError):
        if path.parent.name == _RECORDS and path.suffix == ".json":
            return _load_record(path)
        if path.is_file():
            return _marked(load_bundle(path, curves=curves), bundle_edits(path))
        return load_search(path) if is_search(path) else _marked(load_run(path, curves=curves), edits(path))


def _load_record(path: Path) -> LoadedRun:
    """Load a published result: a record in ``records/`` with its notes, which state the verdict."""
    with raising(RunError, f"{path}: is not a published result with notes in {_NOTES}", *UNREADABLE, SpecError):
        notes = read_yaml(path.parent.parent / _NOTES)[path.stem]
        record = json.loads(path.read_text(encoding="utf-8"))
        figures = {
            name: Spread(mean=figure["value"], stdev=None, ci95=None, num_rounds=1, reason=figure["reason"])
            for name, figure in record["figures"].items()
        }
        for name, number in notes["figures"].items():
            figures[name] = Spread(mean=number, stdev=None, ci95=None, num_rounds=1)
        verdict, version, started_at = notes["verdict"], record["environment"]["accelmark"], record["started_at"]
        case = CaseResult(
            key=record["key"], task="train", unit=record["unit"], state="succeeded", converged=record["converged"],
            verdict=verdict, marks=record["marks"], figures=figures, rounds=(), reasons=tuple(notes["notes"]),
        )  # fmt: skip
        summary = Summary(
            accelmark_version=version, run=path.stem, started_at=started_at, finished_at=started_at, state="succeeded",
            vendor=record["vendor"], cases=(case,),
        )  # fmt: skip
    return LoadedRun(path, summary, {})


def _marked(run: LoadedRun, problems: Sequence[str]) -> LoadedRun:
    if not problems:
        return run
    cases = tuple(case.model_copy(update={"marks": (*case.marks, "edited")}) for case in run.summary.cases)
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    what = f"{run.path}: {problems[0]}{more}: see 'accelmark verify {run.path}'"
    return replace(run, summary=run.summary.model_copy(update={"cases": cases}), problems=(*run.problems, what))


def unmarked(run: LoadedRun) -> Summary:
    """Return the summary of a run without what reading it added: it is the same for a directory and its bundle."""
    cases = [
        case.model_copy(update={"marks": tuple(mark for mark in case.marks if mark != "edited")})
        for case in run.summary.cases
    ]
    return run.summary.model_copy(update={"cases": tuple(cases)})


def without_copies(runs: Sequence[LoadedRun], named: Collection[Path] = ()) -> tuple[list[LoadedRun], list[str]]:
    """Return ``runs`` without copies of the same results, such as bundles and exports to MLflow, and unreadable rounds.

    Of several with equal summaries, those whose path is in ``named`` are kept, else the one with the fewest unreadable
    rounds, a directory before a bundle. An export has no rounds, which matters only if it is kept.
    """
    copies: dict[str, list[LoadedRun]] = {}
    for run in runs:
        copies.setdefault(unmarked(run).model_dump_json(), []).append(run)
    kept: list[LoadedRun] = []
    for group in copies.values():
        best = min(group, key=lambda run: (len(run.problems), run.packed is not None))
        kept += [run for run in group if run.path in named] or [best]
    paths, problems = {run.path for run in kept}, list[str]()
    for run in runs:
        names = (name for case in run.summary.cases for name in case.rounds)
        if run.path in paths or run.packed is not None or any((run.path / name).is_dir() for name in names):
            problems += run.problems
    return kept, problems
