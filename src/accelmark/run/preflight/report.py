"""Preflight as the command line uses it: one table, and a refusal where something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accelmark.datasets import dataset_specs, place_of
from accelmark.plan.plan import Plan
from accelmark.run.preflight.check import Preflight
from accelmark.run.preflight.facts import HostProblem
from accelmark.spec.catalog import load_case
from accelmark.spec.errors import AccelmarkError, Problem, SpecError


class NotReadyError(SpecError):
    """Hosts are not ready for what is asked of them."""

    exit_code = 1


def preflight(plan: Plan) -> list[HostProblem]:
    """Look at every host that the plan uses; returns all that is wrong with them."""
    if plan.cluster.launcher != "ssh":
        return []
    return asyncio.run(Preflight(plan, given_data(plan)).run())


def refuse(problems: Sequence[HostProblem], plan: Plan) -> None:
    """Do nothing where hosts are ready.

    Raises:
        NotReadyError: with every problem; warnings count where the run is strict.
    """
    bad = [problem for problem in problems if problem.severity == "error" or plan.strict]
    if bad:
        raise NotReadyError(Problem(problem.host, "", problem.what, problem.hint) for problem in bad)


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
            if place is not None and not (spec.sources and place == place_of(spec)):
                found[place] = None
    return list(found)
