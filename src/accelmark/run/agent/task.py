"""``agent.json``: what a node agent is asked to do for one job on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from accelmark.spec.framework import Server
from accelmark.spec.model import Spec

TASK_FILE: Final = "agent.json"
IDENTITY_FILE: Final = "agent.pid"
EXIT_FILE: Final = "exit.json"
RANKS_FILE: Final = "ranks.json"
AGENT_LOG: Final = "agent.log"
LOCK_FILE: Final = "agent.lock"
"""Locked by a living agent, so that its end shows from outside its container, whatever its process number there is."""
SEEN_FILE: Final = "coordinator.seen"
"""Touched as long as a coordinator follows the job from another machine."""
STOP_FILES: Final = ("stop.asked", "stop.now")
"""Made by whoever cannot send the agent a signal: asks it to end its ranks, or to end them at once."""


class Limits(Spec):
    """When an agent ends its ranks of itself."""

    timeout_s: PositiveFloat | None = None
    """From the start of the agent; null: never."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Longest time in which a rank that has not finished writes nothing."""
    min_free_mib: NonNegativeFloat = 32.0
    """Least free disk space below the job's directory."""
    abandon_s: PositiveFloat | None = None
    """Longest time in which no coordinator asks after the job; null: never, since none could be out of reach."""
    grace_s: PositiveFloat = 45.0
    """From asking ranks to end until they are killed: longer than the 30 s that a launcher of ranks waits."""


class TelemetryTask(Spec):
    """What the telemetry recorder is started with."""

    vendor: str
    vendor_folder: Path
    interval_s: PositiveFloat


class VisibleDevices(Spec):
    """The variable that narrows the devices a rank sees, and how many of them the job was given."""

    variable: str
    count: int = Field(ge=1)


class AgentTask(Spec):
    """One job on one host."""

    schema_version: Literal[1] = 1
    run: str
    """Name of the run directory: the mark of all its processes."""
    host: str
    noderank: int = Field(ge=0)
    nnodes: int = Field(ge=1)
    nproc: int = Field(ge=1)
    """Devices that the job uses on this host."""
    ranks_per_host: int | None = Field(default=None, ge=1)
    """Ranks on each host; null: one per device."""
    command: tuple[str, ...] = Field(min_length=1)
    """The command of one rank; ``python`` and ``job.json`` as whole arguments are replaced by those of this host."""
    job_file: Path
    framework: str
    master_address: str = "127.0.0.1"
    master_port: int = 29501
    local_address: str | None = None
    """Address at which the other hosts reach this one; null lets the launcher find it."""
    environment: dict[str, str] = Field(default_factory=dict)
    threads: int | None = None
    """CPU threads of a rank; null: cores of this host over its ranks."""
    visible_devices: VisibleDevices | None = None
    servers: tuple[Server, ...] = ()
    """The framework's servers on all hosts, by noderank."""
    interface: str | None = None
    """Network interface that ranks of several hosts talk through; null finds it from the route to host 0."""
    clear_caches: bool = False
    """Drop the page cache before the ranks start."""
    host_lock: Path | None = None
    """Locked while the job runs, so that two runs never share a host; null on this machine."""
    adaptation: Path | None = None
    """The vendor's folder for this case, to be carried out before the ranks start."""
    requirements: Path | None = None
    """Packages of the ranks: the vendor's file for the case, which replaces the case's own."""
    telemetry: TelemetryTask | None = None
    limits: Limits = Limits()

    @property
    def ranks(self) -> range:
        """The global ranks of this host."""
        return range(self.noderank * self.num_ranks, (self.noderank + 1) * self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks on this host."""
        return self.ranks_per_host or self.nproc

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return self.nnodes * self.num_ranks

    @property
    def launcher_log(self) -> str:
        """File name of the launcher's own output, FlagPerf's."""
        return f"start_{self.framework}_task.log"
