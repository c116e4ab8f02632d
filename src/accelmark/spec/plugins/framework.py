"""The interface of a framework: ``frameworks/<name>/framework.yaml``, and the launch of its ranks on a host."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from pydantic import Field
from typing_extensions import Self

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK
from accelmark.spec.model import Spec
from accelmark.spec.parallelism import has_part
from accelmark.spec.plugins.vendor import FrameworkDevice
from accelmark.spec.settings.training import Scalar

RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that every launch sets for each rank: global rank, rank on the host, and the number of each."""
STACKS_SIGNAL: Final = signal.SIGRTMIN + 7
"""At this signal a rank writes the stacks of its threads to its log."""


def collectives_address(node_dir: Path, rank: int) -> str:
    """Return the abstract address of a rank's socket, which sends its last collectives (``LastCollectives``)."""
    return f"\0accelmark-{hashlib.sha256(str(node_dir).encode()).hexdigest()[:32]}-rank{rank}"


class SettingNeeds(Spec):
    """What training settings need beyond a framework's ``requires``: packages, or a newer version of the framework."""

    when: dict[str, Scalar] = Field(min_length=1)
    """Dotted setting -> value; all have to match. ``parallelism`` matches its name, or an axis that a mesh has."""
    requires: tuple[str, ...]
    """Requirements as pip takes them: ``torch>=2.8``."""
    instead: str
    """What to set where they are not met: ``parallelism=ddp``."""


class RefusedSettings(Spec):
    """A combination of training settings that a framework does not support."""

    when: dict[str, Scalar] = Field(min_length=1)
    """As in :class:`SettingNeeds`."""
    unless: dict[str, Scalar] = Field(default_factory=dict)
    """Exceptions: dotted setting -> value; one match suffices."""
    unless_capability: str | None = None
    """Exception: the device has this capability (``fp8``)."""
    reason: str
    """The reason, and what to set instead."""

    def applies(self, value_of: Callable[[str], object], capabilities: Collection[str]) -> bool:
        """Whether settings with these values are refused on a device with these capabilities."""
        unless = any(_is_set(value_of, *item) for item in self.unless.items())
        excepted = unless or self.unless_capability in capabilities
        return all(_is_set(value_of, *item) for item in self.when.items()) and not excepted


def _is_set(value_of: Callable[[str], object], key: str, value: Scalar) -> bool:
    actual = value_of(key)
    return has_part(actual, str(value)) if key == "parallelism" else actual == value


class FrameworkSpec(Spec):
    """A framework, described without importing it."""

    name: str
    """The name used in keys (``pytorch``)."""
    title: str
    """The framework's own spelling of its name."""
    module: str
    """The module that a program imports (``torch``)."""
    companion_modules: tuple[str, ...] = ()
    """Further top-level modules that the framework's distribution installs."""
    checked_imports: tuple[str, ...] = ()
    """Modules that preflight imports where they are installed, because a broken one stops ranks (``torchvision``)."""
    distributions: tuple[str, ...] = Field(min_length=1)
    """Names of the packages that may provide ``module``, most likely first."""
    versions: str = ""
    """Versions that AccelMark supports, as a specifier (``>=2.6``)."""
    processes: Literal["device", "host"]
    """Whether a rank uses one device or all devices of its host."""
    timing: Literal["step", "window"]
    """Whether single steps can be timed on the device, or only windows of steps."""
    devices: dict[str, FrameworkDevice] = Field(default_factory=dict)
    """Vendor -> device, for vendors whose ``vendor.yaml`` does not list this framework."""
    reserved_variables: tuple[str, ...] = ()
    """Variables set by the launch; a vendor's script may not change them."""
    reported_variables: tuple[str, ...] = ()
    """Prefixes of variables that change how the framework runs, recorded in ``sys_info.json``."""
    connection_errors: tuple[str, ...] = ()
    """Parts of error messages, in lower case, that ranks print after another rank has ended."""
    numeric_variables: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Variables that make the framework compute in another precision than declared -> values that do not."""
    caches: dict[str, str] = Field(default_factory=dict)
    """Variable -> directory of its compiler cache in the node's directory, so that each round starts without."""
    parallelism: tuple[str, ...] = ("ddp",)
    """Values of the setting ``parallelism`` that the framework supports: names, and axes of a mesh."""
    setting_requires: tuple[SettingNeeds, ...] = ()
    """What some settings need, each with what to set instead."""
    refused_settings: tuple[RefusedSettings, ...] = ()
    """Combinations of settings that planning rejects."""
    requires: tuple[str, ...] = ()
    """Requirements to install the framework for AccelMark (``accelmark[torch]``)."""

    def ranks_per_host(self, num_devices: int) -> int:
        """Return the number of ranks on a host where a job uses ``num_devices`` devices."""
        return num_devices if self.processes == "device" else 1

    def needs_of(self, value_of: Callable[[str], object]) -> dict[str, tuple[str, ...]]:
        """Return {setting, with what to set instead: requirements} of the settings with these values."""
        return {
            f"{', '.join(f'{key}={value_of(key)}' for key in rule.when)} (or set {rule.instead})": rule.requires
            for rule in self.setting_requires
            if all(_is_set(value_of, *item) for item in rule.when.items())
        }


class Server(Spec):
    """The address of a server that the framework runs on one host of a job."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class HostPlace(NamedTuple):
    """One host's part in a job: the arguments of a framework's launch."""

    nnodes: int
    nproc: int
    num_ranks: int
    """Ranks to start on this host."""
    noderank: int
    master_address: str
    master_port: int
    local_address: str | None
    """Address of this host, reachable from the others; None if unknown."""
    interface: str | None
    """Network interface for data exchange between hosts; None if unknown."""
    servers: Sequence[Server]
    """The servers of all hosts by node rank; empty if the cluster file lists no ports."""
    python: str
    rank_command: Sequence[str]


class Launch(NamedTuple):
    """The process that starts all ranks of a job on one host, and ends when they have ended."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}
    """Variables with values that may not be overridden."""
    defaults: Mapping[str, str] = {}
    """Default values; the cluster file, the vendor and the host may override them."""


class DeviceSupport(NamedTuple):
    """Whether the installed framework can use a device type, and the version or reason."""

    works: bool
    reason: str


class LaunchRecord(Spec):
    """``ranks.json``: how the ranks of a launch ended."""

    exit_codes: dict[int, int | None]
    """Global rank -> exit code, negative for a signal; null if unknown."""
    signal: str | None = None
    problem: str | None = None

    def exit_code(self) -> int:
        """Return the exit code of a launch: 0 when every rank exited with 0, 130 when they were cancelled, else 1."""
        codes = set(self.exit_codes.values())
        if codes == {0}:
            return EXIT_OK
        if self.problem is None and (self.signal is not None or codes <= {0, EXIT_CANCELLED, None}):
            return EXIT_CANCELLED
        return EXIT_FAILED

    def write(self) -> None:
        """Write ``ranks.json`` to the node directory, and print how each rank ended."""
        path = Path(os.environ.get("ACCELMARK_NODE_DIR") or ".") / "ranks.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        temporary.replace(path)
        for rank, code in self.exit_codes.items():
            print(f"rank {rank}: exit code {'unknown' if code is None else code}", flush=True)


class FrameworkLaunch(Protocol):
    """The module ``launch.py``. A launch of several ranks writes a :class:`LaunchRecord` to the node's directory."""

    def launch(self, place: HostPlace) -> Launch:
        """Return the process that starts the ranks of ``place``."""
        ...

    def device_support(self, device_type: str, version: str) -> DeviceSupport:
        """Determine from the files of the installed framework whether it was built for a device type."""
        ...


class RankPlace(NamedTuple):
    """A rank's place in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Self:
        """Read :data:`RANK_VARIABLES`; without them, return the place of a single rank."""
        return cls(*(int(os.environ.get(name, default)) for name, default in zip_strict(RANK_VARIABLES, cls())))

    def variables(self) -> dict[str, str]:
        """Return :data:`RANK_VARIABLES` with the values of this rank."""
        return dict(zip_strict(RANK_VARIABLES, map(str, self)))


_RUN: Final = (
    "import sys; sys.path = [entry for entry in sys.path if entry]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command for ``python -m module`` without the working directory on ``sys.path`` (-P of Python 3.11)."""
    return [python, "-c", _RUN, module, *arguments]
