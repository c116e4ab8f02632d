"""The contract of a framework: ``frameworks/<name>/framework.yaml``, and how its ranks are started on a host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final, Literal, Protocol, Self, final

from pydantic import Field

from accelmark.spec.model import Spec
from accelmark.spec.plugins.vendor import FrameworkDevice
from accelmark.spec.settings import Scalar

RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that every framework's launch gives to each rank: global rank, rank on the host, and how many of each."""
LAUNCH_FILE: Final = "launch"
"""Module of a framework's folder that starts ranks; it imports no framework."""
BACKEND_FILE: Final = "backend"
"""Module of a framework's folder that trains; imported by ranks only."""


class RefusedSettings(Spec):
    """Training settings that do not work together in a framework."""

    when: dict[str, Scalar] = Field(min_length=1)
    """Dotted setting -> value; all have to match."""
    unless: dict[str, Scalar] = Field(default_factory=dict)
    """Dotted setting -> value; one that matches lifts the refusal."""
    reason: str
    """What goes wrong, and what to set instead."""

    def applies(self, value_of: Callable[[str], object]) -> bool:
        """Whether settings with these values are refused."""
        matches = all(value_of(key) == value for key, value in self.when.items())
        return matches and not any(value_of(key) == value for key, value in self.unless.items())


class FrameworkSpec(Spec):
    """A framework, described without importing it."""

    name: str
    """The name used in keys (``pytorch``)."""
    title: str
    module: str
    """The module that a program imports (``torch``)."""
    companion_modules: tuple[str, ...] = ()
    """Further top-level modules that the framework's distribution installs."""
    distributions: tuple[str, ...] = Field(min_length=1)
    """Names of the packages that may provide ``module``, most likely first."""
    versions: str = ""
    """Versions that AccelMark supports, as a specifier (``>=2.6``)."""
    processes: Literal["device", "host"]
    """Whether one process drives one device, or all devices of its host."""
    timing: Literal["step", "window"]
    """Whether the end of a step can be marked on the device, or only the end of a window of steps."""
    devices: dict[str, FrameworkDevice] = Field(default_factory=dict)
    """Vendor -> device, for vendors whose ``vendor.yaml`` does not list this framework."""
    reserved_variables: tuple[str, ...] = ()
    """Variables set by the launch, which a vendor's script may not change."""
    reported_variables: tuple[str, ...] = ()
    """Prefixes of variables that change how the framework runs, recorded in ``sys_info.json``."""
    caches: dict[str, str] = Field(default_factory=dict)
    """Variable -> subdirectory of the node directory in which the framework keeps what it compiles. Each round starts
    with empty caches; a variable that is set already is left alone."""
    refused_settings: tuple[RefusedSettings, ...] = ()
    """Combinations of settings that are refused when a run is planned."""
    requires: tuple[str, ...] = ()
    """Requirements to install the framework for AccelMark (``accelmark[torch]``)."""

    def ranks_per_host(self, num_devices: int) -> int:
        """Return the number of ranks on a host where a job uses ``num_devices`` devices."""
        return num_devices if self.processes == "device" else 1


class Server(Spec):
    """The address of a server that the framework runs on one host of a job."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host's part in a job, as a framework's launch needs it."""

    nnodes: int
    """Hosts of the job."""
    nproc: int
    """Devices that the job uses on each host."""
    num_ranks: int
    """Ranks to start on this host."""
    noderank: int
    master_address: str
    """Address of host 0 as all hosts reach it."""
    master_port: int
    local_address: str | None
    """Address of this host as the others reach it; None where it is not known."""
    interface: str | None
    """Network interface through which ranks of several hosts exchange data; None where it is not known."""
    servers: Sequence[Server]
    """The servers of all hosts by noderank; empty where the cluster file names no ports."""
    python: str
    rank_command: Sequence[str]
    """The command that each rank runs."""


@final
@dataclass(frozen=True, slots=True)
class Launch:
    """The process that starts all ranks of a job on one host, and ends when they have ended."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the ranks need with exactly these values."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables for which a value set by the cluster file, the vendor or the host takes precedence."""


@final
@dataclass(frozen=True, slots=True)
class DeviceSupport:
    """Whether the installed framework can use a device type, and the version or reason."""

    works: bool
    reason: str


class LaunchRecord(Spec):
    """``ranks.json``: what a launch of several ranks saw of their ends."""

    exit_codes: dict[int, int | None]
    """Global rank -> exit code, negative for a signal; null where the launch did not see one."""
    signal: str | None = None
    """Signal that made the launch end its ranks (``SIGTERM``)."""
    problem: str | None = None
    """Why the ranks could not be started."""


class FrameworkLaunch(Protocol):
    """The module ``launch.py`` of a framework's folder.

    A launch that starts several ranks writes a :class:`LaunchRecord` to ``ranks.json`` in the node directory
    (``ACCELMARK_NODE_DIR``); without that file its own exit code counts for all of them.
    """

    def launch(self, place: HostPlace) -> Launch:
        """Return how the ranks of ``place`` are started."""
        ...

    def device_support(self, device_type: str, version: str) -> DeviceSupport:
        """Tell from the files of the installed framework whether it was built for a device type."""
        ...


@final
@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Self:
        """Read :data:`RANK_VARIABLES`; without them this is the only rank."""
        return cls(
            *(int(os.environ.get(name, default)) for name, default in zip(RANK_VARIABLES, astuple(cls()), strict=True))
        )

    def variables(self) -> dict[str, str]:
        """Return the variables from which a rank learns its place."""
        return dict(zip(RANK_VARIABLES, map(str, astuple(self)), strict=True))
