"""The interface of launchers. A launcher's folder has ``launcher.py`` with ``create(plan, run) -> Launcher``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from accelmark.plan.plan import Plan
from accelmark.run.agent.task import NodeJob
from accelmark.run.launchers.host import PreflightHost
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.launcher import load_launcher


class AgentHandle(Protocol):
    """The node agent of one job on one host.

    Each method may be called again after it failed; none blocks the event loop.
    """

    @property
    def node(self) -> NodeJob:
        """The agent's job on its host."""
        ...

    async def prepare(self) -> None:
        """Deliver to the host what the agent needs.

        Raises:
            AccelmarkError: the host cannot run the job; it is named.
        """
        ...

    async def start(self) -> None:
        """Start the agent so that it outlives the coordinator.

        Raises:
            AccelmarkError: it could not be started; the host is named.
        """
        ...

    async def attach(self) -> bool:
        """Find an agent that an earlier coordinator started; False where none was."""
        ...

    async def wait(self) -> NodeExit:
        """Wait for the agent's end, copying its files here meanwhile.

        Only the agent's ``exit.json`` can mean success. Without it the job is lost, and its processes are ended.
        """
        ...

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end its ranks, or to kill them ``at_once``; :meth:`wait` returns soon after."""
        ...


class Launcher(ABC):
    """Starts node agents on the hosts of a plan's cluster.

    Args:
        plan: the run.
        run: its directory on this machine.
    """

    def __init__(self, plan: Plan, run: Path) -> None:
        self.plan = plan
        self.run = run
        self.spec = load_launcher(plan.cluster.launcher)

    @property
    def python(self) -> str:
        """The hosts' Python."""
        return self.plan.cluster.python

    @property
    def rank_python(self) -> str:
        """The Python that ranks run with: the container's, else the hosts'."""
        container = self.plan.cluster.container
        return container.python if container is not None else self.python

    @property
    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Variables with which the hosts' Python imports AccelMark."""

    @abstractmethod
    def agent(self, node: NodeJob) -> AgentHandle:
        """Return the agent of a job on one host; nothing is started yet."""

    @abstractmethod
    async def hosts(self, specs: Sequence[HostSpec]) -> Sequence[PreflightHost]:
        """Return hosts for preflight, after requesting an allocation where that is needed.

        Raises:
            RunError: there is no allocation.
        """

    @abstractmethod
    def host_command(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host, started on this machine."""

    @abstractmethod
    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return, in order, all commands for a job on one host; those that the agent starts come last."""

    def allocation_commands(self) -> list[list[str]]:
        """Return the commands that run on this machine before any host is reached."""
        return []

    def master_address(self, host: HostSpec) -> str:
        """Return the address at which ranks on other hosts reach rank 0 on ``host``."""
        return host.address

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run that still run on hosts without a coordinator.

        Returns one message for each host that could not be reached.
        """
        return []

    async def close(self) -> None:  # noqa: B027  nothing to close is the common case
        """Close connections and return allocations; agents continue."""
