"""What the coordinator asks of a launcher: one link for each job and host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from accelmark.run.agent.task import AgentTask
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import JobSpec, NodeExit

if TYPE_CHECKING:
    from accelmark.run.launchers.place import Place


@final
@dataclass(frozen=True, slots=True)
class NodeWork:
    """A job's part on one host, as the coordinator hands it to a launcher."""

    host: HostSpec
    node_dir: Path
    """Where its files come home to."""
    job: JobSpec
    task: AgentTask


class Link(Protocol):
    """One job on one host. Every method may be called again after its failure; none blocks the event loop."""

    @property
    def work(self) -> NodeWork:
        """What this link is for."""
        ...

    async def prepare(self) -> None:
        """Bring to the host what the agent needs.

        Raises:
            AccelmarkError: the host cannot take the job; the host is named.
        """
        ...

    async def start(self) -> None:
        """Start the agent.

        Raises:
            AccelmarkError: it could not be started; the host is named.
        """
        ...

    async def attach(self) -> bool:
        """Take up an agent that an earlier coordinator started; False where there never was one."""
        ...

    async def wait(self) -> NodeExit:
        """Follow the agent to its end, its files coming home meanwhile.

        The agent's own word counts. An agent that is gone without one makes the job lost, never succeeded, and what
        it left running is ended.
        """
        ...

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end its ranks, or to kill them ``at_once``; :meth:`wait` then returns soon."""
        ...


class Launcher(Protocol):
    """Starts agents on the hosts of a cluster."""

    @property
    def fetches_here(self) -> bool:
        """Whether data that this machine fetches is there for the hosts; else their links see to it."""
        ...

    def link(self, work: NodeWork) -> Link:
        """Return the link for a job's part on one host; nothing is started yet."""
        ...

    @property
    def python(self) -> str:
        """The hosts' own Python."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """What makes that Python find AccelMark, once it is there."""
        ...

    def first(self) -> list[list[str]]:
        """Return the commands that would be run here before any host is reached."""
        ...

    def on(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command of this machine that runs ``argv`` on a host."""
        ...

    def describe(self, work: NodeWork) -> list[list[str]]:
        """Return the commands that would be run for ``work`` in their order, each as its arguments.

        Those that the agent starts come last, as they are on the host.
        """
        ...

    def master_address(self, host: HostSpec) -> str:
        """Return the address at which the ranks of other hosts reach rank 0 on ``host``."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return variables that ranks need because of how they are launched."""
        ...

    async def places(self, hosts: Sequence[HostSpec]) -> Sequence[Place]:
        """Return hosts as preflight looks at them; what has to be asked for first (an allocation) is.

        Raises:
            RunError: they cannot be had.
        """
        ...

    async def tidy(self, hosts: Sequence[HostSpec]) -> list[str]:
        """End agents of this run that still live on hosts although nobody follows them.

        Returns what could not be reached, for people: such agents end once nobody has asked after them for long.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; what runs goes on."""
        ...
