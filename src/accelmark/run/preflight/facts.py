"""Evaluate the facts that preflight collected on hosts: pure functions from facts to problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, final

from accelmark.plan.plan import PlannedJob
from accelmark.spec.cluster import CONTAINER_ENGINES, ClusterSpec
from accelmark.spec.errors import EXIT_FAILED, Problem, SpecError
from accelmark.spec.model import Spec
from accelmark.spec.number_format import counted, percent

OLDEST_PYTHON: Final = (3, 11)
CLOCK_TOLERANCE_S: Final = 5.0
"""Largest difference of clocks with which logs of several hosts can be compared."""
AGENT_PACKAGES: Final = {"psutil": "psutil", "pydantic": "pydantic", "yaml": "PyYAML"}
"""Modules that the node agent imports -> their packages."""
_BUSY_LOAD: Final = 0.5
"""Load per core above which the host counts as busy."""
_BUSY_MEMORY_MIB: Final = 1024.0
_BUSY_UTILISATION: Final = 0.05
_HOSTS_SHOWN: Final = 8
"""Most hosts that are named at one problem."""

Severity = Literal["error", "warning"]


@final
@dataclass(frozen=True, slots=True)
class HostProblem:
    """One problem of one host."""

    host: str
    what: str
    hint: str
    """What to do."""
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.host}: {self.what} ({self.hint})"


def grouped(problems: Sequence[HostProblem]) -> list[HostProblem]:
    """Return the problems with those that several hosts share as one, whose ``host`` names these, at most a few."""
    hosts: dict[HostProblem, list[str]] = {}
    for problem in problems:
        hosts.setdefault(replace(problem, host=""), []).append(problem.host)
    return [replace(problem, host=_abridged(names)) for problem, names in hosts.items()]


def _abridged(names: Sequence[str]) -> str:
    more = len(names) - _HOSTS_SHOWN
    shown = ", ".join(names[:_HOSTS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


class HostsNotReadyError(SpecError):
    """Hosts are not ready for the jobs."""

    exit_code = EXIT_FAILED

    def __init__(self, found: Sequence[HostProblem], *, strict: bool) -> None:
        self.found = tuple(found)
        """All problems, including warnings."""
        self.strict = strict
        """Whether warnings count as errors."""
        bad = [problem for problem in found if problem.severity == "error" or strict]
        super().__init__(Problem(problem.host, "", problem.what, problem.hint) for problem in bad)


class DeviceFacts(Spec):
    """One device of the vendor under test."""

    name: str
    driver: str | None = None
    utilisation: float | None = None
    memory_used_mib: float | None = None


class HostFacts(Spec):
    """Output of :mod:`accelmark.run.onhost.probe`."""

    time: float
    hostname: str
    boot_id: str
    python: tuple[int, int, int]
    executable: str
    not_writable: str | None
    free_mib: float
    memory_mib: float
    cpus: int
    load1: float
    busy_ports: tuple[int, ...]
    refusals: dict[str, str]
    """URLs of services that its jobs ask and that it cannot connect to, each with the reason."""
    missing_directories: tuple[str, ...]
    missing_files: tuple[str, ...]
    lacking_modules: tuple[str, ...]
    engine_problem: str | None
    held_by: str | None
    may_clear_caches: bool
    sees_lock: bool | None = None
    """Whether the coordinator's lock of the run directory is visible on it; null where they share none."""

    @property
    def lacking_packages(self) -> list[str]:
        """The packages of ``lacking_modules``."""
        return [AGENT_PACKAGES.get(module, module) for module in self.lacking_modules]


def missing_data(name: str, path: str) -> HostProblem:
    """Return the problem of a host that has no directory ``path`` with data."""
    hint = "copy or mount it there, or correct data in the run file (--data)"
    return HostProblem(name, f"the data directory {path} is missing", hint)


def refused(name: str, url: str, why: str) -> HostProblem:
    """Return the problem of a host that cannot connect to the service at ``url``."""
    return HostProblem(name, f"{url} cannot be reached: {why}", "check --endpoint, and that the server runs")


def host_problems(
    name: str,
    facts: HostFacts,
    cluster: ClusterSpec,
    clock_offset_s: float,
    work: str,
    visible_file: Path | None = None,
    *,
    sets_threads: bool = False,
) -> list[HostProblem]:
    """Return the problems of a single host.

    ``clock_offset_s`` is its clock minus this machine's, ``work`` its work directory, ``visible_file`` a file in the
    run directory that it must see at the same path, and ``sets_threads`` whether all jobs state their threads.
    """
    found: list[HostProblem] = []

    def error(what: str, hint: str) -> None:
        found.append(HostProblem(name, what, hint))

    engine = CONTAINER_ENGINES[cluster.container.engine] if cluster.container is not None else None
    packages = facts.lacking_packages
    install = f"run there: {facts.executable} -m pip install {' '.join(packages)}"
    set_python = "or set python in the cluster file to that of a virtual environment with them"
    lacking = f"{facts.executable} has no {', '.join(packages)}", f"{install}; {set_python}"
    if facts.held_by is not None:
        error(f"is in use by {facts.held_by}", "wait until it ends, or stop it with 'accelmark stop'")
    if facts.python < OLDEST_PYTHON and cluster.container is None:
        version = ".".join(map(str, facts.python))
        error(f"{facts.executable} is Python {version}, 3.11 is needed", "set python in the cluster file")
    if facts.lacking_modules and engine is None:
        error(*lacking)
    elif facts.lacking_modules and engine is not None and not engine.ends_processes:
        what = f"{lacking[0]}: what a killed agent leaves in a container there is not ended"
        found.append(HostProblem(name, what, lacking[1], "warning"))
    if facts.not_writable is not None:
        error(f"{work} cannot be written: {facts.not_writable}", "choose another directory, mount it, or free space")
    elif facts.free_mib < cluster.min_disk_mib:
        what = f"{facts.free_mib:.0f} MiB are free in {work}, {cluster.min_disk_mib} are needed"
        error(what, "free space, choose another directory, or lower min_disk_mib in the cluster file")
    if facts.memory_mib < cluster.min_memory_mib:
        what = f"{facts.memory_mib:.0f} MiB of memory are free, {cluster.min_memory_mib} are needed"
        error(what, "end other processes on it, or lower min_memory_mib in the cluster file")
    for port in facts.busy_ports if facts.held_by is None else ():
        error(f"port {port} is in use", f"find the process: ss -ltnp sport = :{port}; or set master_port")
    found += (refused(name, url, why) for url, why in facts.refusals.items())
    found += (missing_data(name, path) for path in facts.missing_directories)
    for path in facts.missing_files:
        if visible_file is not None and path == str(visible_file):
            hint = "choose a run directory on a file system that all nodes share (--out)"
            error(f"cannot see {visible_file.parent} of this machine", hint)
        else:
            error(f"the file {path} is missing", "copy it there, or correct image_file in the cluster file")
    if facts.sees_lock is False and visible_file is not None:
        what = f"does not see that {visible_file.parent} is locked on this machine: locks of that file system are local"
        error(what, "mount it so that flock works between nodes (Lustre: -o flock), or choose another one (--out)")
    if facts.engine_problem is not None and cluster.container is not None and engine is not None:
        chosen, program = cluster.container.engine, engine.check[0]
        what = f"the container engine {chosen}" if chosen == program else f"{program}, which {chosen} needs,"
        what = f"{what} {facts.engine_problem}"
        error(what, f"install it, or repair it until '{' '.join(engine.check)}' works there")
    if cluster.clear_caches and not facts.may_clear_caches:
        found.append(HostProblem(name, "caches cannot be dropped", "run as root, or remove clear_caches", "warning"))
    if abs(clock_offset_s) > CLOCK_TOLERANCE_S:
        what = f"its clock is {clock_offset_s:+.1f} s off this machine's"
        found.append(HostProblem(name, what, "synchronise it by NTP", "warning"))
    if facts.load1 > max(1.0, _BUSY_LOAD * facts.cpus):
        idle = facts.cpus - round(facts.load1)
        use = f", or, where the CPU computes, use the idle cores: --set threads={idle}"
        hint = "end other processes" + (use if idle > 0 and not sets_threads else "")
        found.append(
            HostProblem(name, f"busy: load {facts.load1:.1f} on {counted(facts.cpus, 'core')}", hint, "warning")
        )
    return found


def device_problems(name: str, devices: Sequence[DeviceFacts], vendor: str, needed: int) -> list[HostProblem]:
    """Return the problems of a host's devices: too few, or busy."""
    found: list[HostProblem] = []
    if len(devices) < needed:
        have = f"{len(devices)} devices" if devices else "no device"
        found.append(HostProblem(name, f"has {have} of {vendor}, {needed} are needed", "see 'accelmark doctor' there"))
    for index, device in enumerate(devices[:needed]):
        if (device.utilisation or 0.0) > _BUSY_UTILISATION or (device.memory_used_mib or 0.0) > _BUSY_MEMORY_MIB:
            what = f"device {index} ({device.name}) is not idle: {percent(device.utilisation or 0)} busy"
            what += f", {device.memory_used_mib or 0:.0f} MiB used"
            found.append(HostProblem(name, what, "end the processes that use it", "warning"))
    return found


def chip_problems(name: str, devices: Sequence[DeviceFacts], jobs: Sequence[PlannedJob]) -> list[HostProblem]:
    """Return the devices of a host that are not the chip that a key names."""
    found: dict[str, HostProblem] = {}
    for job in jobs:
        chip = job.job.chip
        for index, device in enumerate(devices):
            if chip is not None and not chip.matches_name(device.name):
                what = f"{job.job.key} names {chip.title}, but device {index} is {device.name!r}"
                problem = HostProblem(name, what, "name the chip that is there in the key")
                found.setdefault(str(job.job.key), problem)
    return list(found.values())


def cluster_problems(
    facts: Mapping[str, HostFacts],
    devices: Mapping[str, Sequence[DeviceFacts]],
    cluster: ClusterSpec,
    *,
    one_host_per_machine: bool = True,
) -> list[HostProblem]:
    """Return the problems between hosts: one machine twice, differing drivers, devices or Pythons."""
    found: list[HostProblem] = []
    machines: dict[tuple[str, str], str] = {}
    for name, fact in facts.items() if one_host_per_machine else ():
        other = machines.setdefault((fact.boot_id, fact.hostname), name)
        if other != name:
            found.append(HostProblem(name, f"is the same machine as {other}", "list each host once"))
    kinds: dict[str, dict[str, str]] = {
        "driver": {n: ", ".join(sorted({d.driver for d in ds if d.driver})) for n, ds in devices.items()},
        "devices": {n: ", ".join(sorted({d.name for d in ds})) for n, ds in devices.items()},
        "Python": {n: ".".join(map(str, fact.python)) for n, fact in facts.items() if cluster.container is None},
    }
    for kind, values in kinds.items():
        first = next(iter(values), "")
        for name, value in values.items():
            if value != values[first]:
                what = f"has {kind} {value or 'unknown'}, {first} has {values[first] or 'unknown'}"
                found.append(HostProblem(name, what, "use hosts of one kind: the slowest limits a job", "warning"))
    return found
