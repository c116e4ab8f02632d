"""Preflight as the command line uses it: one table, and a refusal where something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accelmark.datasets import dataset_specs, locate
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.display.observer import Watcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.preflight.check import Preflight
from accelmark.run.preflight.facts import HostProblem, NotReadyError
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.catalog import load_case
from accelmark.spec.errors import AccelmarkError


async def ready(directory: RunDirectory, launcher: Launcher, jobs: Sequence[PlannedJob], watcher: Watcher) -> None:
    """Look at every host that ``jobs`` are about to be started on, and tell what is only worth a warning.

    Raises:
        NotReadyError: with every problem of every host; warnings count where the run is strict.
    """
    plan = directory.plan
    problems = await Preflight(directory, launcher, jobs, given_data(plan)).run()
    refuse(problems, plan)
    for problem in problems:
        watcher.note(f"warning: {problem}")


def refuse(problems: Sequence[HostProblem], plan: Plan) -> None:
    """Do nothing where hosts are ready.

    Raises:
        NotReadyError: with every problem; warnings count where the run is strict.
    """
    if any(problem.severity == "error" or plan.strict for problem in problems):
        raise NotReadyError(problems, strict=plan.strict)


def print_table(problems: Sequence[HostProblem], console: Console | None = None) -> None:
    """Print one table of every problem of every host."""
    if not problems:
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("host", "problem", "what to do"):
        table.add_column(heading, overflow="fold")
    for problem in problems:
        style = "red" if problem.severity == "error" else "yellow"
        table.add_row(Text(problem.host), Text(problem.what, style=style), Text(problem.hint))
    (console or Console(highlight=False, stderr=True)).print(table)


def given_data(plan: Plan) -> list[Path]:
    """Return the data directories that hosts cannot fetch for themselves."""
    found: dict[Path, None] = {}
    for job in plan.jobs:
        try:
            specs = dataset_specs(load_case(job.job.case.name).data, job.job.case.name)
        except AccelmarkError:
            continue
        for spec in specs:
            place = job.job.data_dirs.get(spec.name)
            if place is not None and not (spec.sources and place == locate(spec)):
                found[place] = None
    return list(found)
