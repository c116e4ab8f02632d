"""Runs from wherever people point: a run, or a directory of runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from accelmark.results.store import LoadedRun, load_runs
from accelmark.spec.errors import RequestError


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Read every run that ``paths`` stand for, in their order; a directory of runs stands for each run below it.

    Returns:
        The runs, and one sentence for each that could not be read.

    Raises:
        RequestError: a path is not there, or is no directory.
    """
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        if path.is_file():
            raise RequestError(f"{path}: is a file that no run can be read from; name a run, bundle or directory")
        if not path.is_dir():
            raise RequestError(f"{path}: there is no such run, bundle or directory of runs")
        found, bad = load_runs([path])
        if not found and not bad:
            bad = [f"{path}: holds no run"]
        runs += found
        problems += bad
    return runs, problems
