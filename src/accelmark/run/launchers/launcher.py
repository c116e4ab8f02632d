"""The interface of launchers. A launcher's folder has ``launcher.py`` with ``create(plan, run) -> Launcher``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from accelmark.plan.plan import Plan
from accelmark.run.agent.rank_exit import NodeState
from accelmark.run.agent.task import NodeJob
from accelmark.run.host import Host
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.sandboxes.sandbox import ModuleCommand, Sandbox, job_sandbox
from accelmark.spec.cluster import HostSpec
from accelmark.spec.plugins.catalog import find
from accelmark.spec.plugins.launcher import load_launcher


class Launcher(ABC):
    """Starts node agents on the hosts of a plan's cluster; ``run`` is the run's directory on this machine."""

    visible_file: Path | None = None
    """A file of this machine that the hosts must see at the same path; None: nothing is shared."""

    shared_directory: Path | None = None
    """A directory that must exist on every host, below which AccelMark writes; None: AccelMark makes it."""

    reconnect_s: float = 0.0
    """Longest time for which a host may be unreachable before its job is lost."""

    locks_hosts: bool = False
    """Whether a job locks its hosts, so that no other run uses them."""

    leaves_ranks = False
    """Whether ranks continue after :meth:`close`, as their coordinator ends early: an allocation is kept for them."""

    def __init__(self, plan: Plan, run: Path) -> None:
        self.plan = plan
        self.run = run
        self.spec = load_launcher(plan.cluster.launcher)
        self.report: Callable[[str], None] = lambda _: None
        """Receives messages for the user, such as the reason why an allocation waits."""
        self.work_directory = str(run)
        """The directory below which AccelMark writes on each host."""

    @property
    def python(self) -> str:
        """The hosts' Python."""
        return self.plan.cluster.python

    @property
    def rank_python(self) -> str:
        """The Python that ranks run with: the container's, else the hosts'."""
        container = self.plan.cluster.container
        return container.python if container is not None else self.python

    def python_of(self, framework: str) -> str:
        """Return the Python of a framework's ranks: of its environment, if it has one."""
        return self.plan.cluster.environment_python(framework) or self.rank_python

    @property
    @abstractmethod
    def code(self) -> PurePosixPath:
        """The directory on the hosts that AccelMark is imported from."""

    @property
    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Variables that let the hosts' Python import AccelMark."""

    @abstractmethod
    def host(self, spec: HostSpec) -> Host:
        """Return a host; nothing is connected or requested yet."""

    @abstractmethod
    def agent(self, node: NodeJob) -> AgentHandle:
        """Return the agent of a job on one host; nothing is started yet."""

    def agents(self, nodes: Sequence[NodeJob]) -> Sequence[AgentHandle]:
        """Return the agents of a job on all of its hosts; nothing is started yet."""
        return [self.agent(node) for node in nodes]

    @abstractmethod
    def agent_module(self, node: NodeJob) -> ModuleCommand:
        """Return the agent of a job as a module to run in its sandbox."""

    @abstractmethod
    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return, in order, all commands for a job on one host; those that the agent starts come last."""

    async def allocate(self) -> None:  # noqa: B027  most hosts need no allocation
        """Ensure that hosts may be used; raises RunError if there is no allocation."""

    async def allocation_end(self) -> tuple[NodeState, str] | None:
        """Return the state and the reason of an allocation that ended by itself; None while it lasts."""
        return None

    async def deliver(self, host: HostSpec) -> None:  # noqa: B027  not all hosts need a delivery
        """Ensure that AccelMark is on a host; raises HostError if it could not be delivered."""

    def common_commands(self, nodes: Sequence[NodeJob]) -> list[list[str]]:
        """Return the commands that run on this machine and start the agents of a job on all of its hosts."""
        return []

    def allocation_commands(self) -> list[list[str]]:
        """Return the commands that run on this machine before any host is reached."""
        return []

    async def master_address(self, host: HostSpec) -> str:
        """Return the address of rank 0 on ``host`` for ranks on other hosts."""
        return host.address

    def path_on_host(self, path: Path) -> Path:
        """Return the path on the hosts of a plug-in's folder, or of a file inside it."""
        return path

    def sandbox(self, node: NodeJob) -> Sandbox:
        """Return the sandbox of a job."""
        return job_sandbox(self.plan, node.job, self.code, self.path_on_host(find("vendors", self.plan.vendor).path))

    def native_command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark on a host itself."""
        return Sandbox().command(self.python, ModuleCommand(module, arguments, "", self.variables))

    def sandbox_command(self, node: NodeJob, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark in the sandbox of a job, before its files exist."""
        agent = self.agent_module(node)
        readable = [path for path in agent.readable if path.is_dir() and path not in node.job.data_dirs.values()]
        command = replace(agent, module=module, arguments=arguments, name=f"{agent.name}-preflight", readable=readable)
        return self.sandbox(node).command(self.python, command)

    def clean_up_command(self, node: NodeJob, node_dir: PurePosixPath) -> list[str]:
        """Return the command on a host that ends the processes of a dead agent of a job."""
        agent = self.agent_module(node)
        ending = replace(
            agent, module="accelmark.run.processes", arguments=(str(node_dir),), environment=self.variables
        )
        return self.sandbox(node).clean_up(self.python, ending)

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run without a coordinator; returns one message for each host that was not reached."""
        return []

    def abort(self) -> None:  # noqa: B027  most launchers hold nothing
        """Return allocations without waiting: the process is about to exit at once."""

    async def close(self) -> None:  # noqa: B027  nothing to close is the common case
        """Close connections and return allocations; agents continue."""
