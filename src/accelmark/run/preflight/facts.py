"""Facts about hosts, as programs on them report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from pydantic import Field

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import EXIT_FAILED, Problem, SpecError
from accelmark.spec.model import Spec

AGENT_PACKAGES: Final = {"psutil": "psutil", "pydantic": "pydantic", "yaml": "PyYAML"}
"""Modules that the node agent imports -> their packages."""


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
    def lacking_packages(self) -> list[str]:
        """The packages of ``lacking_modules``."""
        return [AGENT_PACKAGES.get(module, module) for module in self.lacking_modules]


class PackageFacts(Spec):
    """Output of the program ``packages`` of :mod:`accelmark.run.onhost`."""

    executable: str
    python: tuple[int, int, int]
    versions: dict[str, str | None] = Field(default_factory=dict)
    """Package -> its installed version."""
    broken: dict[str, str] = Field(default_factory=dict)
    """Installed module or package that cannot be imported -> the last line of the error."""


@final
@dataclass(slots=True)
class HostState:
    """Facts about a host, and the run's needs there."""

    name: str
    facts: HostFacts
    plan: Plan
    jobs: Sequence[PlannedJob] = ()
    """The jobs that are about to be started on it; empty where a cluster is checked without a run."""
    clock_offset_s: float = 0.0
    """Its clock minus this machine's."""
    work_directory: str = ""
    visible_file: Path | None = None
    """A file in the run directory that it must see at the same path."""
    is_localhost: bool = False
    devices: Sequence[DeviceFacts] | None = None
    """The vendor's devices; None where they were not read."""
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    """Framework -> the packages of the Python of its ranks."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Framework -> the container image in which they were read."""

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the run."""
        return self.plan.cluster

    @property
    def num_devices(self) -> int:
        """Number of devices that its jobs use."""
        return max((node.nproc for job in self.jobs for node in job.nodes if node.host == self.name), default=1)
