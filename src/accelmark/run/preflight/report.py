"""Run preflight before jobs are started, and for a cluster or packages alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from accelmark.datasets.ensure import locate
from accelmark.datasets.spec import DatasetSpec
from accelmark.datasets.verify import outline
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.controller.data import datasets_of
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost.probe import refusal
from accelmark.run.preflight.check import Preflight, endpoints
from accelmark.run.preflight.facts import HostProblem, HostsNotReadyError, grouped, missing_data, refused
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import ExternalJob
from accelmark.spec.number_format import counted, duration
from accelmark.spec.plugins.requirements import Need, describe, install_command, missing, page_needs
from accelmark.spec.plugins.trainer import placeholders
from accelmark.telemetry.detect import detect

_SHOWN_EVERY_S: Final = 0.5
_HERE: Final = "this machine"


async def _show(observer: RunObserver, what: str) -> None:
    """Report to the observer that hosts are being checked, and for how long, until this is cancelled."""
    started = time.monotonic()
    while True:
        observer.checking(f"{what}, {duration(time.monotonic() - started)}")
        await asyncio.sleep(_SHOWN_EVERY_S)


async def run_preflight(
    directory: RunDirectory, launcher: Launcher, jobs: Sequence[PlannedJob], observer: RunObserver
) -> None:
    """Check every host that ``jobs`` are about to be started on, and report warnings to the observer.

    Raises:
        HostsNotReadyError: with every problem of every host; warnings count where the run is strict.
    """
    plan = directory.plan
    num_hosts = len({node.host for job in jobs for node in job.nodes})
    shown = asyncio.create_task(_show(observer, f"checking {counted(num_hosts, 'host')}"))
    try:
        paths = list(dict.fromkeys(path for _, path in given_data(plan)))
        problems = await Preflight(directory, launcher, jobs, paths).run()
        problems += _lacks(page_needs())
        problems += await asyncio.to_thread(_wrong_here, plan, launcher)
    finally:
        shown.cancel()
        observer.checking("")
    require_ready(problems, plan)
    for problem in grouped(problems):
        observer.note(f"warning: {problem}")


async def check_cluster(cluster: ClusterSpec, report: Callable[[str], None] = lambda _: None) -> list[HostProblem]:
    """Check all hosts of a cluster, and its spares, as for a job on all of them; needs no run.

    ``report`` receives what the launcher waits for.

    Raises:
        RunError: there is no allocation of hosts.
    """
    everything = cluster.model_copy(update={"hosts": (*cluster.hosts, *cluster.spares), "spares": ()})
    with tempfile.TemporaryDirectory(prefix="accelmark-preflight-") as place:
        directory = RunDirectory.create(Path(place) / "run", plan_of_hosts(everything))
        launcher = create_launcher(directory.plan, directory.path)
        launcher.report = report
        try:
            return await Preflight(directory, launcher, ()).run()
        finally:
            await launcher.close()


async def missing_here(directory: RunDirectory, launcher: Launcher) -> list[HostProblem]:
    """Return what this machine lacks for the run: programs, and where the jobs run here, devices, packages and data."""
    cluster, is_here = directory.plan.cluster, launcher.spec.is_localhost
    programs = {command[0]: "run it on a machine of the cluster" for command in launcher.allocation_commands()}
    if cluster.container is not None and is_here:
        engine = CONTAINER_ENGINES[cluster.container.engine].check[0]
        programs[engine] = "install it, or correct container.engine in the cluster file"
    lacking = {program: hint for program, hint in programs.items() if shutil.which(program) is None}
    problems = [HostProblem(_HERE, f"{name} is not on the PATH", hint) for name, hint in lacking.items()]
    own = [Need(requirement=one, needed_by=f"launcher {launcher.spec.name}") for one in launcher.spec.requires]
    problems += _lacks([*own, *page_needs()])
    if not is_here:
        return problems
    if not detect([directory.plan.vendor], read=False):
        what = f"no device of {directory.plan.vendor} was found"
        problems.append(HostProblem(_HERE, what, "'accelmark doctor' lists what was found"))
    preflight = Preflight(directory, launcher, directory.plan.jobs)
    hosts = [launcher.host(spec) for spec in cluster.hosts]
    absent = dict.fromkeys(str(path) for _, path in given_data(directory.plan) if not path.exists())
    problems += [missing_data(host.name, path) for host in hosts for path in absent]
    refusals = {url: await asyncio.to_thread(refusal, url) for url in endpoints(directory.plan.jobs)}
    problems += [refused(host.name, url, why) for host in hosts for url, why in refusals.items() if why is not None]
    problems += _wrong_here(directory.plan, launcher)
    return problems + [problem for host in hosts for problem in await preflight.check_packages(host, imports=False)]


def _lacks(needs: Sequence[Need]) -> list[HostProblem]:
    """Return the packages that this Python, which starts the jobs and writes the run's page, lacks for it."""
    lacking = missing(needs)
    return [HostProblem(_HERE, describe(lacking), install_command(lacking))] if lacking else []


def _wrong_here(plan: Plan, launcher: Launcher) -> list[HostProblem]:
    """Return what keeps jobs on this machine from running: data of another layout, unset variables of trainers."""
    if not launcher.spec.is_localhost:
        return []
    found = [
        (f"{spec.title} in {path}: {problem.what}", problem.hint or "correct --data")
        for spec, path in given_data(plan)
        if path.is_dir()
        for problem in outline(spec, path)
    ]
    hint = "set it in the environment of the cluster file, or before the command"
    found += [(f"the variable {name}, which trainer {user} needs, is not set", hint) for name, user in _unset(plan)]
    hosts = [launcher.host(spec) for spec in plan.cluster.hosts]
    return [HostProblem(host.name, what, remedy) for host in hosts for what, remedy in dict.fromkeys(found)]


def _unset(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the variables that commands of external trainers name, and that the ranks would not have."""
    inherited = () if plan.cluster.container is not None else os.environ
    for job in (planned.job for planned in plan.jobs):
        if isinstance(job.work, ExternalJob):
            trainer = job.work.trainer
            given = {*inherited, *plan.cluster.environment, *trainer.environment, *job.vendor_environment}
            for name in placeholders((*trainer.command, *trainer.cases.get(job.key.model, ()))):
                if name.startswith("env:") and name.removeprefix("env:") not in given:
                    yield name.removeprefix("env:"), trainer.name


def require_ready(problems: Sequence[HostProblem], plan: Plan) -> None:
    """Check that there are no errors.

    Raises:
        HostsNotReadyError: with every problem; warnings count where the run is strict.
    """
    if any(problem.severity == "error" or plan.strict for problem in problems):
        raise HostsNotReadyError(problems, strict=plan.strict)


def given_data(plan: Plan) -> list[tuple[DatasetSpec, Path]]:
    """Return the data sets that hosts do not fetch themselves, with their directories."""
    found: dict[tuple[DatasetSpec, Path], None] = {}
    for job in plan.jobs:
        with contextlib.suppress(AccelmarkError):  # a case that was removed since: a resumed run is refused for it
            pairs = datasets_of(job.job)
            found |= dict.fromkeys((spec, path) for spec, path in pairs if not (spec.sources and path == locate(spec)))
    return list(found)
