"""The checks of preflight: facts about hosts as programs there report them, and functions from facts to problems."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from accelmark.datasets.ensure import locate
from accelmark.datasets.spec import DatasetSpec
from accelmark.datasets.verify import outline
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.controller.data import datasets_of
from accelmark.run.host import Host, HostError
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import command
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import EXIT_FAILED, AccelmarkError, Problem, RequestError, SpecError
from accelmark.spec.job import ExternalJob
from accelmark.spec.model import Spec
from accelmark.spec.number_format import counted, percent
from accelmark.spec.plugins.catalog import framework_device, load_framework, load_vendor
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.programs import placeholders
from accelmark.spec.plugins.requirements import Missing, Need, install_command, missing, missing_text, pip_install
from accelmark.spec.plugins.vendor import FrameworkDevice
from accelmark.telemetry.inventory import default_vendor

OLDEST_PYTHON: Final = (3, 9)
"""Of agents and ranks. The coordinator's is in :mod:`accelmark.cli`."""
AGENT_PACKAGES: Final = {"psutil": "psutil", "pydantic": "pydantic", "yaml": "PyYAML"}
"""Modules that the node agent imports -> their packages."""
_RANK_NEEDS: Final = (
    "numpy", "packaging", "psutil", "pydantic>=2.9", "PyYAML", 'eval_type_backport; python_version < "3.10"',
)  # fmt: skip
RANK_NEEDS: Final = tuple(Need(requirement=requirement, needed_by="AccelMark") for requirement in _RANK_NEEDS)
"""What AccelMark itself needs in the environment of a framework."""
_IMPORT_TIMEOUT_S: Final = 300.0
_CLOCK_TOLERANCE_S: Final = 5.0
"""Largest difference of clocks: logs of several hosts can still be compared."""
_BUSY_LOAD: Final = 0.5
"""Load per core above which the host counts as busy."""
_BUSY_MEMORY_MIB: Final = 1024.0
_BUSY_UTILISATION: Final = 0.05
_MIN_SHARED_MEMORY_MIB: Final = 16.0
_HOSTS_SHOWN: Final = 8
"""Most hosts that are named at one problem."""

HERE: Final = "this machine"
_error = partial(Problem, "", "")
_warning = partial(Problem, "", "", severity="warning")


class HostsNotReadyError(SpecError):
    """Hosts are not ready for the jobs."""

    exit_code = EXIT_FAILED

    def __init__(self, problems: Sequence[Problem], *, strict: bool) -> None:
        self.all_problems = tuple(problems)
        """All problems, including warnings."""
        self.strict = strict
        """Whether warnings count as errors."""
        super().__init__(problem for problem in problems if problem.severity == "error" or strict)


class DeviceFacts(Spec):
    """One device of the vendor under test."""

    name: str
    driver: str | None = None
    utilisation: float | None = None
    memory_used_mib: float | None = None


class HostFacts(Spec):
    """Output of the program ``probe`` of :mod:`accelmark.run.onhost`."""

    time: float
    hostname: str
    boot_id: str
    python: tuple[int, int, int]
    executable: str
    not_writable: str | None
    free_mib: float
    memory_mib: float
    shared_memory_mib: float | None = None
    """Free space of ``/dev/shm``; null where there is none."""
    cpus: int
    load1: float
    busy_ports: tuple[int, ...]
    refusals: dict[str, str]
    """URLs of services that its jobs use and that it cannot connect to, each with the reason."""
    missing_directories: tuple[str, ...]
    missing_files: tuple[str, ...]
    lacking_modules: tuple[str, ...]
    engine_problem: str | None
    held_by: str | None
    may_clear_caches: bool
    sees_lock: bool | None = None
    """Whether the coordinator's lock of the run directory is visible on it; null where they share none."""

    @property
    def lacking_packages(self) -> str:
        """The packages of ``lacking_modules``, separated by spaces."""
        return " ".join(AGENT_PACKAGES.get(module, module) for module in self.lacking_modules)


class PackageFacts(Spec):
    """Output of the program ``packages`` of :mod:`accelmark.run.onhost`."""

    executable: str
    python: tuple[int, int, int]
    versions: dict[str, str | None] = Field(default_factory=dict)
    """Package -> its installed version."""
    broken: dict[str, str] = Field(default_factory=dict)
    """Installed module or package that cannot be imported -> the last line of the error."""


@dataclass(slots=True)
class HostState:
    """Facts about a host, and the run's needs there."""

    name: str
    facts: HostFacts
    launcher: Launcher
    jobs: Sequence[PlannedJob] = ()
    """The jobs that are about to be started on it; empty where a cluster is checked without a run."""
    clock_offset_s: float = 0.0
    """Its clock minus this machine's."""
    devices: Sequence[DeviceFacts] | None = None
    """The vendor's devices; None where they were not read."""
    packages: dict[str, PackageFacts] = field(default_factory=dict)
    """Framework -> the packages of the Python of its ranks."""
    images: dict[str, str] = field(default_factory=dict)
    """Framework -> the container image in which they were read."""

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the run."""
        return self.launcher.plan.cluster

    @property
    def is_localhost(self) -> bool:
        """Whether it is this machine."""
        return self.launcher.spec.is_localhost


def problems_of_host(host: HostState) -> list[Problem]:
    """Return all problems of one host, each once."""
    checks = (_agent, _resources, _network_and_data, _settings, load, _rank_packages, devices)
    return list(dict.fromkeys(replace(problem, where=host.name) for check in checks for problem in check(host)))


def _agent(host: HostState) -> Iterator[Problem]:
    """Check that no other run uses the host, and that its Python can run the node agent."""
    facts, container = host.facts, host.cluster.container
    if facts.held_by is not None:
        yield _error(f"is in use by {facts.held_by}", "wait until it ends, or stop it with 'accelmark stop'")
    if container is None and facts.python < OLDEST_PYTHON:
        yield _too_old(facts, "set python in the cluster file to a newer one on that host")
    elif packages := facts.lacking_packages:
        what = f"{facts.executable} has no {packages.replace(' ', ', ')}"
        install = f"run there: {facts.executable} -m pip install {packages}"
        hint = f"{install}; or set python in the cluster file to a virtual environment's Python that has them"
        if container is None:
            yield _error(what, hint)
        elif not CONTAINER_ENGINES[container.engine].ends_processes:
            yield _warning(f"{what}: what a killed agent leaves in a container there is not ended", hint)


def _too_old(facts: HostFacts | PackageFacts, hint: str) -> Problem:
    version, oldest = (".".join(map(str, numbers)) for numbers in (facts.python, OLDEST_PYTHON))
    return _error(f"{facts.executable} is Python {version}, {oldest} is needed", hint)


def _resources(host: HostState) -> Iterator[Problem]:
    """Check disk, memory (also that which processes share) and the container engine."""
    facts, cluster = host.facts, host.cluster
    if facts.not_writable is not None:
        what = f"{host.launcher.work_directory} cannot be written: {facts.not_writable}"
        yield _error(what, "choose another directory, mount it, or free space")
    elif facts.free_mib < cluster.min_disk_mib:
        what = f"{facts.free_mib:.0f} MiB are free in {host.launcher.work_directory}, {cluster.min_disk_mib} are needed"
        yield _error(what, "free space, choose another directory, or lower min_disk_mib in the cluster file")
    if facts.memory_mib < cluster.min_memory_mib:
        what = f"{facts.memory_mib:.0f} MiB of memory are free, {cluster.min_memory_mib} are needed"
        yield _error(what, "end other processes on it, or lower min_memory_mib in the cluster file")
    shared_mib = facts.shared_memory_mib
    if shared_mib is not None and shared_mib < _MIN_SHARED_MEMORY_MIB and cluster.container is None:
        what = f"shared memory is full: {shared_mib:.0f} MiB are free in /dev/shm"
        yield _error(what, "remove files there, or enlarge it")
    if cluster.container is not None and facts.engine_problem is not None:
        check = CONTAINER_ENGINES[cluster.container.engine].check
        hint = f"install it, or repair it until '{' '.join(check)}' works there"
        yield _error(f"the container engine {check[0]} {facts.engine_problem}", hint)


def _network_and_data(host: HostState) -> Iterator[Problem]:
    """Check ports, the servers that jobs measure, data, and files and locks that the host shares with this machine."""
    facts, seen = host.facts, host.launcher.visible_file
    for port in facts.busy_ports if facts.held_by is None else ():  # another run that uses the host uses the ports
        yield _error(f"port {port} is in use", f"find the process: ss -ltnp sport = :{port}; or set master_port")
    for url, why in facts.refusals.items():
        yield _error(f"{url} cannot be reached: {why}", "check --endpoint, and that the server runs")
    for path in facts.missing_directories:
        hint = "copy or mount it there, or correct data in the run file (--data)"
        yield _error(f"the data directory {path} is missing", hint)
    for spec, place in given_data(host.launcher.plan) if host.is_localhost and host.jobs else ():
        for problem in outline(spec, place) if place.is_dir() else ():
            yield _error(f"{spec.title} in {place}: {problem.what}", problem.hint or "correct --data")
    for path in facts.missing_files:
        if seen is not None and path == str(seen):
            hint = "choose a run directory on a file system that all nodes share (--out)"
            yield _error(f"cannot see {seen.parent} of this machine", hint)
        else:
            yield _error(f"the file {path} is missing", "copy it there, or correct image_file in the cluster file")
    if facts.sees_lock is False and seen is not None:
        what = f"does not see that {seen.parent} is locked on this machine: locks of that file system are local"
        hint = "mount it so that flock works between nodes (Lustre: -o flock), or choose another one (--out)"
        yield _error(what, hint)


def load(host: HostState) -> Iterator[Problem]:
    """Check that no other processes use the host's cores."""
    facts, idle = host.facts, host.facts.cpus - round(host.facts.load1)
    if facts.load1 > max(1.0, _BUSY_LOAD * facts.cpus):
        sets_threads = bool(host.jobs) and all(job.job.work.threads is not None for job in host.jobs)
        use = f", or, where the CPU computes, use the idle cores: --set threads={idle}"
        hint = "end other processes" + (use if idle > 0 and not sets_threads else "")
        yield _warning(f"busy: load {facts.load1:.1f} on {counted(facts.cpus, 'core')}", hint)


def _settings(host: HostState) -> Iterator[Problem]:
    """Check clock and page cache, and that the variables of external trainers are set, where they run here."""
    if abs(host.clock_offset_s) > _CLOCK_TOLERANCE_S:
        yield _warning(f"its clock is {host.clock_offset_s:+.1f} s off this machine's", "synchronise it by NTP")
    if host.cluster.clear_caches and not host.facts.may_clear_caches:
        yield _warning("caches cannot be dropped", "run as root, or remove clear_caches")
    inherited = () if host.cluster.container is not None else os.environ
    for job in (planned.job for planned in host.jobs if host.is_localhost):
        if isinstance(job.work, ExternalJob):
            trainer = job.work.trainer
            known = {*inherited, *host.cluster.environment, *trainer.environment, *job.vendor_environment}
            for name in placeholders((*trainer.command, *trainer.cases.get(job.key.model, ()))):
                if name.startswith("env:") and name.removeprefix("env:") not in known:
                    what = f"the variable {name.removeprefix('env:')}, which trainer {trainer.name} needs, is not set"
                    yield _error(what, "set it in the environment of the cluster file, or before the command")


def devices(host: HostState) -> Iterator[Problem]:
    """Check that the host has enough idle devices, and those that the keys name."""
    if host.devices is None:
        return
    nodes = [node for job in host.jobs for node in job.nodes if node.host == host.name]
    needed = max((node.nproc for node in nodes), default=1)
    if len(host.devices) < needed:
        have = f"{len(host.devices)} devices" if host.devices else "no device"
        yield _error(f"has {have} of {host.launcher.plan.vendor}, {needed} are needed", "see 'accelmark doctor' there")
    for index, device in enumerate(host.devices[:needed]):
        if (device.utilisation or 0.0) > _BUSY_UTILISATION or (device.memory_used_mib or 0.0) > _BUSY_MEMORY_MIB:
            what = f"device {index} ({device.name}) is not idle: {percent(device.utilisation or 0)} busy"
            yield _warning(f"{what}, {device.memory_used_mib or 0:.0f} MiB used", "end the processes that use it")
    for job in host.jobs if not host.launcher.plan.open else ():
        chip = job.job.chip
        for index, device in enumerate(host.devices[:needed]):
            if chip is not None and not chip.matches_name(device.name):
                what = f"{job.job.key} names {chip.title}, but device {index} is {device.name!r}"
                yield _error(what, "name the chip that is there in the key")
                break


def _rank_packages(host: HostState) -> Iterator[Problem]:
    """Check that the Pythons of the ranks have the packages that jobs need, and can import them."""
    for framework, (needs, installs) in packages_of(host.jobs, host.cluster.environments).items():
        if (facts := host.packages.get(framework)) is not None:
            image, spec = host.images.get(framework), load_framework(framework)
            environment = host.cluster.environments.get(framework) if image is None else None
            needs = [*(RANK_NEEDS if environment or image else ()), *needs]
            device, is_here = known_device(host.launcher.plan.vendor, framework), host.is_localhost
            yield from package_problems(
                facts, needs, installs, spec, environment, image=image, device=device, is_here=is_here
            )


def problems_between(hosts: Sequence[HostState]) -> Iterator[Problem]:
    """Check that no machine is listed twice, and that all hosts have the drivers, devices and Python of the first."""
    machines: dict[tuple[str, str], str] = {}
    for host in hosts:
        other = machines.setdefault((host.facts.boot_id, host.facts.hostname), host.name)
        if other != host.name and load_launcher(host.cluster.launcher).one_host_per_machine:
            yield Problem(host.name, "", f"is the same machine as {other}", "list each host once")
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


def grouped(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with those that several hosts share as one, which names these hosts, at most a few."""
    hosts: dict[Problem, list[str]] = {}
    for problem in problems:
        hosts.setdefault(replace(problem, where=""), []).append(problem.where)

    def abridged(names: Sequence[str]) -> str:
        more = len(names) - _HOSTS_SHOWN
        return ", ".join(names[:_HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")

    return [replace(problem, where=abridged(names)) for problem, names in hosts.items()]


def given_data(plan: Plan) -> list[tuple[DatasetSpec, Path]]:
    """Return the data sets that hosts do not fetch themselves, with their directories."""
    given: dict[tuple[DatasetSpec, Path], None] = {}
    for job in plan.jobs:
        with contextlib.suppress(AccelmarkError):  # a case that was removed since: a resumed run is refused for it
            pairs = datasets_of(job.job)
            given |= dict.fromkeys((spec, path) for spec, path in pairs if not (spec.sources and path == locate(spec)))
    return list(given)


def packages_of(jobs: Sequence[PlannedJob], frameworks: Iterable[str] = ()) -> dict[str, tuple[list[Need], list[str]]]:
    """Return, for each framework of ``jobs``, what they need and what is installed for their ranks.

    Without jobs, return what ``frameworks`` need themselves.
    """
    packages: dict[str, tuple[list[Need], list[str]]] = {}
    for name in frameworks if not jobs else ():
        needs = [Need(requirement=text, needed_by=f"framework {name}") for text in load_framework(name).requires]
        packages[name] = needs, []
    for job in jobs:
        needs, installs = packages.setdefault(job.job.framework, ([], []))
        needs += job.requires
        installs += job.installs
    return packages


async def package_facts(
    host: Host,
    python: str,
    distributions: Sequence[str],
    modules: Sequence[str] = (),
    python_path: Sequence[str] = (),
    imports: Sequence[str] = (),
    enter: Callable[[str], list[str]] | None = None,
) -> PackageFacts:
    """Return the versions of packages of a Python on a host, and which cannot be imported.

    ``modules`` and the modules of the packages ``imports`` are tried, where they are installed. ``enter`` returns the
    command that answers a request in a container.

    Raises HostError: the Python cannot be run.
    """
    names = {"distributions": distributions, "modules": modules, "python_path": python_path, "imports": imports}
    request = json.dumps({name: list(values) for name, values in names.items()})
    argv = command(python, "packages", request) if enter is None else enter(request)
    output = await host.require(argv, f"the packages of {python} cannot be read", timeout_s=_IMPORT_TIMEOUT_S)
    try:
        return PackageFacts.model_validate_json(output.strip().rpartition(b"\n")[2])
    except ValidationError as error:
        raise HostError(host.name, f"{python} did not print its packages: {error.errors()[0]['msg']}") from error


def package_problems(
    facts: PackageFacts,
    needs: Sequence[Need],
    installed: Sequence[str],
    framework: FrameworkSpec,
    environment: Path | None = None,
    *,
    image: str | None = None,
    device: FrameworkDevice | None = None,
    is_here: bool = True,
) -> Iterator[Problem]:
    """Yield what the jobs of a framework need and a host's Python lacks, and its broken modules; ``where`` is empty.

    Args:
        installed: packages that are installed for the ranks before they start.
        environment: its virtual environment, if its ranks run in one.
        is_here: the host is this machine.
    """
    create = create_command(framework.name, environment, is_here=is_here)
    if image is not None:
        create = f"install it in the image {image}"
    all_lacking = missing(needs, facts.versions.get, installed, facts.python)
    for item in all_lacking:
        if item.need.sdk:
            yield _error(missing_text([item]), f"install {item.requirement} from {item.need.sdk}")
    if lacking := [item for item in all_lacking if not item.need.sdk]:
        requirements, index = [item.requirement for item in lacking], _index_of(lacking, framework, device)
        if image is not None:
            hint = f"{create}: {pip_install(requirements, facts.executable)}"
        elif is_here and environment is None:
            hint = install_command(lacking, facts.executable, index)
        else:  # a Python that needs no AccelMark, and may be too old for it
            hint = pip_install(requirements, facts.executable, index)
            hint = hint if is_here else f"run there: {hint}"
        if image is None and any(item.need.needed_by == f"framework {framework.name}" for item in lacking):
            hint = f"{hint}; or, in an environment of its own: {create}" if environment is None else create
        yield _error(missing_text(lacking), hint)
    if environment is not None and facts.python < OLDEST_PYTHON:
        yield _too_old(facts, create)
    yield from broken_imports(facts, framework, create)


def broken_imports(facts: PackageFacts, framework: FrameworkSpec, create: str) -> Iterator[Problem]:
    """Yield a problem for each module that cannot be imported, with the command that repairs it.

    ``create`` installs the framework again, and pip a package that the jobs need, with what that lacks; other modules
    are uninstalled.
    """
    for module, message in facts.broken.items():
        remove = f"{facts.executable} -m pip uninstall {module}"
        hint = remove if facts.versions.get(module) is None else pip_install([module], facts.executable)
        if module in (framework.module, *framework.companion_modules):
            hint = create
        yield _error(f"{facts.executable}: import {module} fails: {message}", hint)


def known_device(vendor: str, framework: str) -> FrameworkDevice | None:
    """Return a vendor's device for ``framework``, None where no file declares it."""
    try:
        return framework_device(load_vendor(vendor), framework)
    except RequestError:
        return None


def _index_of(lacking: Iterable[Missing], framework: FrameworkSpec, device: FrameworkDevice | None) -> str | None:
    """Return the index with the framework's builds for a device, if it has one and the framework is lacking."""
    is_lacking = not {package.name for package in lacking}.isdisjoint(framework.distributions)
    return device.index if device is not None and is_lacking else None


def create_command(framework: str, environment: Path | None = None, *, is_here: bool = True) -> str:
    """Return the command that creates or repairs a framework's environment, here or on the hosts of a cluster file."""
    place = "" if environment is None else f" --path {environment}"
    return f"accelmark env create {framework}" + (place if is_here else " --hosts CLUSTER")


def missing_packages(needs: Iterable[Need]) -> list[Problem]:
    """Return the packages that this Python, which starts the jobs and writes the run's page, lacks for it."""
    lacking = missing(needs)
    return [Problem(HERE, "", missing_text(lacking), install_command(lacking))] if lacking else []


def require_here(needed_by: str, *requirements: str) -> None:
    """Check that this Python has what a verb needs that computes on this machine's devices.

    Raises RequestError: with the missing packages and the command that installs them, in the builds for the devices.
    """
    lacking = missing(Need(requirement=requirement, needed_by=needed_by) for requirement in requirements)
    if lacking:
        vendor = load_vendor(default_vendor())
        indexes = (_index_of(lacking, load_framework(name), device) for name, device in vendor.frameworks.items())
        install = install_command(lacking, index=next(filter(None, indexes), None))
        raise RequestError(f"{missing_text(lacking)}: run {install}")
