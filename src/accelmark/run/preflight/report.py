"""Run preflight before jobs are started, and print its problems."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accelmark.datasets.ensure import locate
from accelmark.datasets.spec import dataset_specs
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.preflight.check import Preflight
from accelmark.run.preflight.facts import HostProblem, HostsNotReadyError
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.plugins.catalog import load_case

_HOSTS_SHOWN: Final = 8
"""Most hosts that are named in one row of the table of problems."""


async def run_preflight(
    directory: RunDirectory, launcher: Launcher, jobs: Sequence[PlannedJob], observer: RunObserver
) -> None:
    """Check every host that ``jobs`` are about to be started on, and report warnings to the observer.

    Raises:
        HostsNotReadyError: with every problem of every host; warnings count where the run is strict.
    """
    plan = directory.plan
    problems = await Preflight(directory, launcher, jobs, given_data(plan)).run()
    require_ready(problems, plan)
    for problem in problems:
        observer.note(f"warning: {problem}")


async def check_cluster(cluster: ClusterSpec) -> list[HostProblem]:
    """Check all hosts of a cluster, and its spares, as for a job on all of them; needs no run.

    Raises:
        RunError: there is no allocation of hosts.
    """
    everything = cluster.model_copy(update={"hosts": (*cluster.hosts, *cluster.spares), "spares": ()})
    with tempfile.TemporaryDirectory(prefix="accelmark-preflight-") as place:
        directory = RunDirectory.create(Path(place) / "run", plan_of_hosts(everything))
        launcher = create_launcher(directory.plan, directory.path)
        try:
            return await Preflight(directory, launcher, ()).run()
        finally:
            await launcher.close()


def require_ready(problems: Sequence[HostProblem], plan: Plan) -> None:
    """Check that there are no errors.

    Raises:
        HostsNotReadyError: with every problem; warnings count where the run is strict.
    """
    if any(problem.severity == "error" or plan.strict for problem in problems):
        raise HostsNotReadyError(problems, strict=plan.strict)


def print_table(problems: Sequence[HostProblem], console: Console | None = None) -> None:
    """Print a table of every problem, with the hosts that have it."""
    if not problems:
        return
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        hosts.setdefault((problem.severity, problem.what, problem.hint), []).append(problem.host)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("hosts", "problem", "what to do"):
        table.add_column(heading, overflow="fold")
    for (severity, what, hint), names in hosts.items():
        style = "red" if severity == "error" else "yellow"
        table.add_row(Text(_abridged(names)), Text(what, style=style), Text(hint))
    (console or Console(highlight=False, stderr=True)).print(table)


def _abridged(names: Sequence[str]) -> str:
    """Return the names of hosts, at most a few of them."""
    more = len(names) - _HOSTS_SHOWN
    shown = ", ".join(names[:_HOSTS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def given_data(plan: Plan) -> list[Path]:
    """Return the data directories that hosts do not fetch themselves."""
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
