"""Progress of runs without a summary, read from their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accelmark.spec.errors import AccelmarkError
from accelmark.spec.number_format import NOTHING, digits, duration, percent, quantity


class LiveJob(NamedTuple):
    """One round of a run in progress."""

    name: str
    state: str
    share: float | None
    facts: dict[str, str]


class LiveRun(NamedTuple):
    """A run without a summary."""

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
    from accelmark.results.rounds.search import is_search
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
                "step": f"{progress.step:,}{total}",
                "loss": NOTHING if progress.loss is None else digits(progress.loss),
                "throughput": quantity(progress.throughput, units[directory]),
                "remaining": NOTHING if progress.eta_s is None else duration(progress.eta_s),
                "power": quantity(progress.devices.power_w, "W"),
                "utilisation": percent(progress.devices.utilisation),
            }
            if progress.metric is not None:
                facts[progress.metric[0].replace("_", " ")] = digits(progress.metric[1])
        shown = {name: value for name, value in facts.items() if value != NOTHING}
        jobs.append(LiveJob(directory, status.state.replace("_", " "), share, shown))
    return LiveRun(name, run.coordinator is not None, "", jobs)


def _live_search(name: str, path: Path) -> LiveRun:
    from accelmark.automl.controller.directory import SearchDirectory
    from accelmark.automl.scoring.summary import summarise

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
    job = LiveJob("search", summary.status, min(max(shares), 1.0) if shares else None, facts)
    return LiveRun(name, summary.status == "running", "", [job])
