"""Runs from wherever people point: a run, a directory of runs, a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from accelmark.results.store import LoadedRun, load_runs
from accelmark.spec.errors import RequestError, RunError

BUNDLE_READERS: Final[dict[str, Callable[[Path], LoadedRun]]] = {}
"""End of a bundle's file name -> what reads its run; whoever writes bundles adds its reader here."""


def open_sources(paths: Iterable[Path]) -> tuple[list[LoadedRun], list[str]]:
    """Read every run that ``paths`` stand for, in their order; a directory of runs stands for each run below it.

    Returns:
        The runs, and one sentence for each that could not be read.

    Raises:
        RequestError: a path is not there, or is a file that is no bundle.
    """
    runs: list[LoadedRun] = []
    problems: list[str] = []
    for path in paths:
        if path.is_dir():
            found, bad = load_runs([path])
            if not found and not bad:
                bad = [f"{path}: holds no run"]
            runs += found
            problems += bad
        elif path.is_file():
            try:
                runs.append(_reader(path)(path))
            except RunError as error:
                problems.append(str(error))
        else:
            raise RequestError(f"{path}: there is no such run, bundle or directory of runs")
    return runs, problems


def _reader(path: Path) -> Callable[[Path], LoadedRun]:
    for suffix, reader in BUNDLE_READERS.items():
        if path.name.endswith(suffix):
            return reader
    known = ", ".join(f"*{suffix}" for suffix in sorted(BUNDLE_READERS)) or "the directory of a run"
    raise RequestError(f"{path}: is a file that no run can be read from (known: {known})")
