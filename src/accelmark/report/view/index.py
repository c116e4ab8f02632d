"""Index of the runs below a directory, and progress of those that have not ended.

A run is read again only when its files change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from accelmark.results.compare.table import Row, rows_of
from accelmark.results.rounds.search import SEARCH_REPORT, is_search
from accelmark.results.sources import find_sources, load_source, round_problems, without_copies
from accelmark.results.store.ended import SUMMARY_FILE, has_ended
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.errors import AccelmarkError, RequestError
from accelmark.spec.number_format import NOTHING, digits, duration, percent, quantity

_MAX_AGE_S: Final = 2.0
_Stamp = tuple[int, int]


class Snapshot(NamedTuple):
    """The runs at one moment."""

    runs: dict[str, LoadedRun]
    """Name (the path below the directory) to run."""
    unfinished: dict[str, Path]
    """Runs that have not ended, or not since they were resumed."""
    problems: list[str]
    rows: list[Row]


@final
class RunIndex:
    """Finds the runs below a directory. Runs are looked up by name in it, so that no name leads to other paths."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise RequestError(f"{directory}: no such directory")
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
        read: list[LoadedRun] = []
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
                read.append(run)
        self._known = known
        kept = without_copies(read)
        runs = {self._name(run.path): run for run in kept}
        problems += round_problems(read, kept)
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
    """Return modification time and size of the file that is written when a run ends; None before, and when resumed."""
    try:
        if path.is_file():
            found = path.stat()
        elif is_search(path):
            found = (path / SEARCH_REPORT).stat()
        elif has_ended(path):
            found = (path / SUMMARY_FILE).stat()
        else:
            return None
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class LiveJob(NamedTuple):
    """One round of a run in progress."""

    name: str
    state: str
    share: float | None
    facts: dict[str, str]


class LiveRun(NamedTuple):
    """A run that has not ended."""

    name: str
    running: bool
    """Whether a coordinator on this machine drives it."""
    problem: str
    jobs: Sequence[LiveJob] = ()


def live_runs(unfinished: Mapping[str, Path]) -> list[LiveRun]:
    """Return the progress of every unfinished run, running ones first; a run that cannot be read has a problem."""
    return sorted((live_run(name, path) for name, path in unfinished.items()), key=lambda run: not run.running)


def live_run(name: str, path: Path) -> LiveRun:
    """Return the progress of a run or a search."""
    from accelmark.run.display.summary import read_status

    try:
        if is_search(path):
            return _live_search(name, path)
        run = read_status(path)
    except (AccelmarkError, OSError) as error:
        return LiveRun(name, False, str(error).replace(f"{path.parent}/", ""))
    units = {job.directory: f"{job.job.work.unit}s/s" for job in run.directory.plan.jobs}
    jobs: list[LiveJob] = []
    for directory, status in run.statuses.items():
        progress = run.progress.get(directory)
        facts = {"reason": status.reason} if status.reason else {}
        share: float | None = 1.0 if status.ended else None
        if progress is not None:
            share = progress.share
            total = f" of {progress.total_steps:,}" if progress.total_steps else ""
            facts = {
                "phase": progress.phase,
                "step": f"{progress.step:,}{total}" if progress.step else NOTHING,
                "loss": NOTHING if progress.loss is None else digits(progress.loss),
                "throughput": quantity(progress.throughput, units[directory]),
                "remaining": NOTHING if progress.eta_s is None else duration(progress.eta_s),
                "power": quantity(progress.devices.power_w, "W"),
                "utilisation": percent(progress.devices.utilisation),
            }
            if progress.metric is not None:
                facts[progress.metric[0].replace("_", " ")] = progress.metric_text
        shown = {name: value for name, value in facts.items() if value != NOTHING}
        jobs.append(LiveJob(directory, status.state.replace("_", " "), share, shown))
    return LiveRun(name, (run.coordinator or run.elsewhere) is not None, "", jobs)


def _live_search(name: str, path: Path) -> LiveRun:
    from accelmark.automl.controller.journal import SearchDirectory
    from accelmark.automl.scoring.score import summarise

    directory = SearchDirectory(path)
    summary, limits = summarise(directory), directory.config().schedule
    finished = summary.trials.get("finished", 0)
    shares = [summary.duration_s / limits.max_duration] if limits.max_duration else []
    shares += [finished / limits.max_trials] if limits.max_trials else []
    facts = {
        "trials": f"{finished} finished of {summary.trials_started}",
        "epochs": str(summary.epochs),
        "score": quantity(summary.final.score, "OP/s"),
        "held-out error": quantity(summary.final.error, "ratio"),
        "idle": percent(summary.utilisation.idle_share),
    }
    job = LiveJob("search", summary.outcome, min(max(shares), 1.0) if shares else None, facts)
    return LiveRun(name, summary.status == "running", "", [job])
