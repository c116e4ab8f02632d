"""The checks of preflight: each is a function from the facts of hosts to problems, listed in one of two tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from accelmark.datasets.ensure import locate
from accelmark.datasets.spec import DatasetSpec
from accelmark.datasets.verify import outline
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.controller.data import datasets_of
from accelmark.run.preflight.facts import HostState
from accelmark.run.preflight.packages import OLDEST_PYTHON, RANK_NEEDS, known_device, package_problems
from accelmark.spec.cluster import CONTAINER_ENGINES
from accelmark.spec.errors import AccelmarkError, Problem
from accelmark.spec.job import ExternalJob
from accelmark.spec.number_format import counted, percent
from accelmark.spec.plugins.catalog import load_framework
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.requirements import Need
from accelmark.spec.plugins.trainer import placeholders

CLOCK_TOLERANCE_S: Final = 5.0
"""Largest difference of clocks: logs of several hosts can still be compared."""
_BUSY_LOAD: Final = 0.5
"""Load per core above which the host counts as busy."""
_BUSY_MEMORY_MIB: Final = 1024.0
_BUSY_UTILISATION: Final = 0.05
_MIN_SHARED_MEMORY_MIB: Final = 16.0
_HOSTS_SHOWN: Final = 8
"""Most hosts that are named at one problem."""

error = partial(Problem, "", "")
warning = partial(Problem, "", "", severity="warning")
Check = Callable[[HostState], Iterator[Problem]]
ClusterCheck = Callable[[Sequence[HostState]], Iterator[Problem]]


def in_use(host: HostState) -> Iterator[Problem]:
    """Check that no other run uses the host."""
    if host.facts.held_by is not None:
        yield error(f"is in use by {host.facts.held_by}", "wait until it ends, or stop it with 'accelmark stop'")


def python_version(host: HostState) -> Iterator[Problem]:
    """Check that the host's Python is new enough for the node agent."""
    if _is_old(host) and host.cluster.container is None:
        version = ".".join(map(str, host.facts.python))
        what = f"{host.facts.executable} is Python {version}, {'.'.join(map(str, OLDEST_PYTHON))} is needed"
        yield error(what, "set python in the cluster file to a newer one on that host")


def _is_old(host: HostState) -> bool:
    return host.facts.python < OLDEST_PYTHON


def agent_packages(host: HostState) -> Iterator[Problem]:
    """Check that the host's Python has the packages of the node agent; one that is too old gets no advice on them."""
    packages, container = host.facts.lacking_packages, host.cluster.container
    if not packages or (_is_old(host) and container is None):
        return
    what = f"{host.facts.executable} has no {', '.join(packages)}"
    install = f"run there: {host.facts.executable} -m pip install {' '.join(packages)}"
    hint = f"{install}; or set python in the cluster file to a virtual environment's Python that has them"
    if container is None:
        yield error(what, hint)
    elif not CONTAINER_ENGINES[container.engine].ends_processes:
        yield warning(f"{what}: what a killed agent leaves in a container there is not ended", hint)


def work_directory(host: HostState) -> Iterator[Problem]:
    """Check that the work directory can be written and has space."""
    facts, needed_mib = host.facts, host.cluster.min_disk_mib
    if facts.not_writable is not None:
        what = f"{host.work_directory} cannot be written: {facts.not_writable}"
        yield error(what, "choose another directory, mount it, or free space")
    elif facts.free_mib < needed_mib:
        what = f"{facts.free_mib:.0f} MiB are free in {host.work_directory}, {needed_mib} are needed"
        yield error(what, "free space, choose another directory, or lower min_disk_mib in the cluster file")


def memory(host: HostState) -> Iterator[Problem]:
    """Check that memory is free, also for processes that share it."""
    free_mib, needed_mib = host.facts.memory_mib, host.cluster.min_memory_mib
    if free_mib < needed_mib:
        what = f"{free_mib:.0f} MiB of memory are free, {needed_mib} are needed"
        yield error(what, "end other processes on it, or lower min_memory_mib in the cluster file")
    shared_mib = host.facts.shared_memory_mib
    if shared_mib is not None and shared_mib < _MIN_SHARED_MEMORY_MIB and host.cluster.container is None:
        yield error(
            f"shared memory is full: {shared_mib:.0f} MiB are free in /dev/shm", "remove files there, or enlarge it"
        )


def ports(host: HostState) -> Iterator[Problem]:
    """Check that the run's ports are free; where another run uses the host, it uses the ports."""
    for port in host.facts.busy_ports if host.facts.held_by is None else ():
        yield error(f"port {port} is in use", f"find the process: ss -ltnp sport = :{port}; or set master_port")


def endpoints(host: HostState) -> Iterator[Problem]:
    """Check that the servers that jobs measure accept connections."""
    for url, why in host.facts.refusals.items():
        yield error(f"{url} cannot be reached: {why}", "check --endpoint, and that the server runs")


def data_directories(host: HostState) -> Iterator[Problem]:
    """Check that the data directories of the user exist."""
    for path in host.facts.missing_directories:
        hint = "copy or mount it there, or correct data in the run file (--data)"
        yield error(f"the data directory {path} is missing", hint)


def data_layout(host: HostState) -> Iterator[Problem]:
    """Check that data on this machine has the layout that its case reads."""
    for spec, path in given_data(host.plan) if host.is_localhost and host.jobs else ():
        for problem in outline(spec, path) if path.is_dir() else ():
            yield error(f"{spec.title} in {path}: {problem.what}", problem.hint or "correct --data")


def shared_files(host: HostState) -> Iterator[Problem]:
    """Check that the host sees the files and locks of this machine that it needs."""
    seen, facts = host.visible_file, host.facts
    for path in facts.missing_files:
        if seen is not None and path == str(seen):
            hint = "choose a run directory on a file system that all nodes share (--out)"
            yield error(f"cannot see {seen.parent} of this machine", hint)
        else:
            yield error(f"the file {path} is missing", "copy it there, or correct image_file in the cluster file")
    if facts.sees_lock is False and seen is not None:
        what = f"does not see that {seen.parent} is locked on this machine: locks of that file system are local"
        hint = "mount it so that flock works between nodes (Lustre: -o flock), or choose another one (--out)"
        yield error(what, hint)


def container_engine(host: HostState) -> Iterator[Problem]:
    """Check that the container engine of the cluster file works."""
    container, problem = host.cluster.container, host.facts.engine_problem
    if container is not None and problem is not None:
        check = CONTAINER_ENGINES[container.engine].check
        hint = f"install it, or repair it until '{' '.join(check)}' works there"
        yield error(f"the container engine {check[0]} {problem}", hint)


def page_cache(host: HostState) -> Iterator[Problem]:
    """Check that this user may drop caches, if the cluster file requests it."""
    if host.cluster.clear_caches and not host.facts.may_clear_caches:
        yield warning("caches cannot be dropped", "run as root, or remove clear_caches")


def clock(host: HostState) -> Iterator[Problem]:
    """Check that the host's clock agrees with this machine's."""
    if abs(host.clock_offset_s) > CLOCK_TOLERANCE_S:
        yield warning(f"its clock is {host.clock_offset_s:+.1f} s off this machine's", "synchronise it by NTP")


def load(host: HostState) -> Iterator[Problem]:
    """Check that no other processes use the host's cores."""
    facts, idle = host.facts, host.facts.cpus - round(host.facts.load1)
    if facts.load1 > max(1.0, _BUSY_LOAD * facts.cpus):
        sets_threads = bool(host.jobs) and all(job.job.work.threads is not None for job in host.jobs)
        use = f", or, where the CPU computes, use the idle cores: --set threads={idle}"
        hint = "end other processes" + (use if idle > 0 and not sets_threads else "")
        yield warning(f"busy: load {facts.load1:.1f} on {counted(facts.cpus, 'core')}", hint)


def trainer_variables(host: HostState) -> Iterator[Problem]:
    """Check that the variables that external trainers name are set, where they run on this machine."""
    inherited = () if host.cluster.container is not None else os.environ
    for job in (planned.job for planned in host.jobs if host.is_localhost):
        if isinstance(job.work, ExternalJob):
            trainer = job.work.trainer
            known = {*inherited, *host.cluster.environment, *trainer.environment, *job.vendor_environment}
            for name in placeholders((*trainer.command, *trainer.cases.get(job.key.model, ()))):
                if name.startswith("env:") and name.removeprefix("env:") not in known:
                    what = f"the variable {name.removeprefix('env:')}, which trainer {trainer.name} needs, is not set"
                    yield error(what, "set it in the environment of the cluster file, or before the command")


def devices(host: HostState) -> Iterator[Problem]:
    """Check that the host has enough idle devices, and those that the keys name."""
    if host.devices is None:
        return
    vendor, needed = host.plan.vendor, host.num_devices
    if len(host.devices) < needed:
        have = f"{len(host.devices)} devices" if host.devices else "no device"
        yield error(f"has {have} of {vendor}, {needed} are needed", "see 'accelmark doctor' there")
    for index, device in enumerate(host.devices[:needed]):
        if (device.utilisation or 0.0) > _BUSY_UTILISATION or (device.memory_used_mib or 0.0) > _BUSY_MEMORY_MIB:
            what = f"device {index} ({device.name}) is not idle: {percent(device.utilisation or 0)} busy"
            what += f", {device.memory_used_mib or 0:.0f} MiB used"
            yield warning(what, "end the processes that use it")
    for job in host.jobs if not host.plan.open else ():
        chip = job.job.chip
        for index, device in enumerate(host.devices[:needed]):
            if chip is not None and not chip.matches_name(device.name):
                what = f"{job.job.key} names {chip.title}, but device {index} is {device.name!r}"
                yield error(what, "name the chip that is there in the key")
                break


def rank_packages(host: HostState) -> Iterator[Problem]:
    """Check that the Pythons of the ranks have the packages that jobs need, and can import them."""
    environments: Iterable[str] = () if host.jobs else host.cluster.environments
    for framework, (needs, installs) in packages_of(host.jobs, environments).items():
        if (facts := host.packages.get(framework)) is not None:
            image, spec = host.images.get(framework), load_framework(framework)
            environment = host.cluster.environments.get(framework) if image is None else None
            needs = [*(RANK_NEEDS if environment or image else ()), *needs]
            device, is_here = known_device(host.plan.vendor, framework), host.is_localhost
            yield from package_problems(
                facts, needs, installs, spec, environment, image=image, device=device, is_here=is_here
            )


def same_machine(hosts: Sequence[HostState]) -> Iterator[Problem]:
    """Check that no machine is listed twice."""
    machines: dict[tuple[str, str], str] = {}
    for host in hosts:
        other = machines.setdefault((host.facts.boot_id, host.facts.hostname), host.name)
        if other != host.name and load_launcher(host.cluster.launcher).one_host_per_machine:
            yield Problem(host.name, "", f"is the same machine as {other}", "list each host once")


def unlike_hosts(hosts: Sequence[HostState]) -> Iterator[Problem]:
    """Check that all hosts have the drivers, devices and Python of the first."""
    with_devices = [(host.name, host.devices) for host in hosts if host.devices]
    kinds: dict[str, dict[str, str]] = {
        "driver": {name: ", ".join(sorted({d.driver for d in found if d.driver})) for name, found in with_devices},
        "devices": {name: ", ".join(sorted({d.name for d in found})) for name, found in with_devices},
        "Python": {h.name: ".".join(map(str, h.facts.python)) for h in hosts if h.cluster.container is None},
    }
    for kind, values in kinds.items():
        first = next(iter(values), "")
        for name, value in values.items():
            if value != values[first]:
                what = f"has {kind} {value or 'unknown'}, {first} has {values[first] or 'unknown'}"
                yield Problem(name, "", what, "use hosts of one kind: the slowest limits a job", "warning")


CHECKS: Final[tuple[Check, ...]] = (
    in_use, python_version, agent_packages, work_directory, memory, ports, endpoints, data_directories, data_layout,
    shared_files, container_engine, page_cache, clock, load, trainer_variables, rank_packages, devices,
)  # fmt: skip
"""The checks of one host."""
CLUSTER_CHECKS: Final[tuple[ClusterCheck, ...]] = (same_machine, unlike_hosts)
"""The checks between hosts."""


def problems_of_host(host: HostState) -> list[Problem]:
    """Return all problems of one host, each once."""
    return list(dict.fromkeys(replace(problem, where=host.name) for check in CHECKS for problem in check(host)))


def grouped(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with those that several hosts share as one, which names these hosts, at most a few."""
    hosts: dict[Problem, list[str]] = {}
    for problem in problems:
        hosts.setdefault(replace(problem, where=""), []).append(problem.where)
    return [replace(problem, where=_abridged(names)) for problem, names in hosts.items()]


def _abridged(names: Sequence[str]) -> str:
    more = len(names) - _HOSTS_SHOWN
    shown = ", ".join(names[:_HOSTS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def given_data(plan: Plan) -> list[tuple[DatasetSpec, Path]]:
    """Return the data sets that hosts do not fetch themselves, with their directories."""
    given: dict[tuple[DatasetSpec, Path], None] = {}
    for job in plan.jobs:
        with contextlib.suppress(AccelmarkError):  # a case that was removed since: a resumed run is refused for it
            pairs = datasets_of(job.job)
            given |= dict.fromkeys((spec, path) for spec, path in pairs if not (spec.sources and path == locate(spec)))
    return list(given)


def packages_of(jobs: Iterable[PlannedJob], frameworks: Iterable[str] = ()) -> dict[str, tuple[list[Need], list[str]]]:
    """Return, for each framework of ``jobs``, what they need and what is installed for their ranks.

    For ``frameworks``, which have no job, return what they need themselves.
    """
    packages: dict[str, tuple[list[Need], list[str]]] = {
        name: ([Need(requirement=text, needed_by=f"framework {name}") for text in load_framework(name).requires], [])
        for name in frameworks
    }
    for job in jobs:
        needs, installs = packages.setdefault(job.job.framework, ([], []))
        needs += job.requires
        installs += job.installs
    return packages
