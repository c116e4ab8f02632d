"""``agent.json``: the task of a node agent, one job on one host; and the names of the files around it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec
from accelmark.spec.plugins.framework import Server

AGENT_MODULE: Final = "accelmark.run.agent.agent"
"""The agent that launchers start on each host of a job: ``python -m accelmark.run.agent.agent NODE_DIR``."""
TASK_FILE: Final = "agent.json"
IDENTITY_FILE: Final = "agent.pid"
EXIT_FILE: Final = "exit.json"
RANKS_FILE: Final = "ranks.json"
AGENT_LOG: Final = "agent.log"
CODE_FILE: Final = "agent.code"
"""On the host: exit code of the command that ran the agent."""
LOCK_FILE: Final = "agent.lock"
"""Locked while the agent runs: its end can be seen from outside its container, where its process number differs."""
HEARTBEAT_FILE: Final = "coordinator.heartbeat"
"""Heartbeat of a coordinator on another machine: touched while it follows the job."""
STOP_FILES: Final = ("stop.requested", "stop.now")
"""Created to make the agent end its ranks, or kill them at once, without a signal."""


class Limits(Spec):
    """An agent ends its ranks at these limits."""

    timeout_s: PositiveFloat | None = None
    """From the start of the agent; null: no limit."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Longest time without output from a rank that has not finished."""
    min_free_mib: NonNegativeFloat = 32.0
    max_log_mib: PositiveFloat = 1024.0
    """Largest log of a rank: its output is kept, copied and read again."""
    abandon_s: PositiveFloat | None = None
    """Longest time without a heartbeat of a coordinator; null: no limit, for agents on the coordinator's machine."""
    host_wait_s: NonNegativeFloat = 0.0
    """Longest time to wait for another run that has locked the host."""
    grace_s: PositiveFloat = 45.0
    """From asking ranks to end until they are killed: longer than the 30 s that a launcher of ranks waits."""


class TelemetryTask(Spec):
    """Arguments of the telemetry recorder."""

    vendor: str
    vendor_folder: Path
    interval_s: PositiveFloat


class VisibleDevices(Spec):
    """The variable that limits the devices visible to ranks, and the number of devices that the job uses."""

    variable: str
    count: int = Field(ge=1)


class AgentTask(Spec):
    """One job on one host."""

    schema_version: Literal[1] = 1
    run: str
    """Name of the run directory; every process of the run has it in its environment."""
    host: str
    noderank: int = Field(ge=0)
    nnodes: int = Field(ge=1)
    nproc: int = Field(ge=1)
    num_ranks: int = Field(ge=1)
    """Ranks on each host."""
    command: tuple[str, ...] = Field(min_length=1)
    """The command of one rank; ``python`` and ``job.json`` as whole arguments are replaced by this host's."""
    job_file: Path
    python: str | None = None
    """Python of the ranks, of an environment of the framework's own; null: the agent's."""
    master_address: str = "127.0.0.1"
    master_port: int = 29501
    local_address: str | None = None
    """This host's address for the other hosts; null: found from the route to host 0."""
    environment: dict[str, str] = Field(default_factory=dict)
    visible_devices: VisibleDevices | None = None
    reported_variables: tuple[str, ...] = ()
    """Prefixes of the vendor's variables that are recorded; see :class:`accelmark.spec.plugins.vendor.VendorSpec`."""
    servers: tuple[Server, ...] = ()
    interface: str | None = None
    """Network interface between ranks of several hosts; null: found from the route to host 0."""
    clear_caches: bool = False
    locks_host: bool = False
    """Whether the host is locked while the job runs, so that two runs never share it."""
    requirements: Path | None = None
    telemetry: TelemetryTask | None = None
    limits: Limits = Limits()

    @property
    def ranks(self) -> range:
        """The global ranks of this host."""
        return range(self.noderank * self.num_ranks, (self.noderank + 1) * self.num_ranks)


class NodeJob(NamedTuple):
    """A job on one of its hosts, as the coordinator passes it to a launcher."""

    host: HostSpec
    node_dir: Path
    """Directory of its files on the coordinator's machine."""
    job: JobSpec
    task: AgentTask
