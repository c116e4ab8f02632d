"""Index of the runs below a directory; a run is read again only when its files change."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final, NamedTuple, final

from accelmark.results.compare.table import Row, rows_of
from accelmark.results.rounds.search import SEARCH_REPORT, is_search
from accelmark.results.sources import find_sources, load_source
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun
from accelmark.spec.errors import AccelmarkError, RunError

_MAX_AGE_S: Final = 2.0
_Stamp = tuple[int, int]


class Snapshot(NamedTuple):
    """The runs at one moment."""

    runs: dict[str, LoadedRun]
    """Name (the path below the directory) to run."""
    unfinished: dict[str, Path]
    """Runs with a plan and without a summary."""
    problems: list[str]
    rows: list[Row]


@final
class RunIndex:
    """Finds the runs below a directory. Runs are looked up by name in it, so that no name leads to other paths."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise RunError(f"{directory}: no such directory")
        self.directory = directory.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[_Stamp, LoadedRun | str]] = {}
        self._snapshot: Snapshot | None = None
        self._taken_s = 0.0

    def snapshot(self) -> Snapshot:
        """Return the runs, at most a few seconds old."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._taken_s > _MAX_AGE_S:
                self._snapshot = self._scan()
                self._taken_s = time.monotonic()
            return self._snapshot

    def _scan(self) -> Snapshot:
        runs: dict[str, LoadedRun] = {}
        unfinished: dict[str, Path] = {}
        known: dict[Path, tuple[_Stamp, LoadedRun | str]] = {}
        paths, problems = find_sources(self.directory)
        for path in paths:
            name = self._name(path)
            stamp = _stamp(path)
            if stamp is None:
                unfinished[name] = path
                continue
            before = self._known.get(path)
            known[path] = before if before is not None and before[0] == stamp else (stamp, _load(path))
            run = known[path][1]
            if isinstance(run, str):
                problems.append(run)
            else:
                runs[name] = run
                problems += run.problems
        self._known = known
        below = [problem.replace(f"{self.directory}/", "") for problem in problems]
        return Snapshot(runs, unfinished, below, rows_of(runs.values()))

    def name_of(self, row: Row) -> str:
        """Return the name of a row's run."""
        return self._name(Path(str(row["path"])))

    def _name(self, path: Path) -> str:
        return self.directory.name if path == self.directory else path.relative_to(self.directory).as_posix()


def _load(path: Path) -> LoadedRun | str:
    try:
        return load_source(path, curves=False)
    except AccelmarkError as error:
        return str(error)


def _stamp(path: Path) -> _Stamp | None:
    """Return modification time and size of the file that is written when a run ends; None before."""
    try:
        file = path if path.is_file() else path / (SEARCH_REPORT if is_search(path) else SUMMARY_FILE)
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
