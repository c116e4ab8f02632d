"""The interface of launchers and of the node agents that they start.

A launcher's folder has ``launcher.py`` with ``create(plan, run) -> Launcher``.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run import onhost
from accelmark.run.agent.rank_exit import NodeState, cause_among, explained, signal_name, tail
from accelmark.run.agent.task import AGENT_LOG, AGENT_MODULE, EXIT_FILE, IDENTITY_FILE, NodeJob
from accelmark.run.host import Host, HostError
from accelmark.run.processes import ProcessId
from accelmark.run.record.states import utc_now
from accelmark.run.sandboxes.sandbox import ModuleCommand, Sandbox, job_sandbox, model_files
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.catalog import find
from accelmark.spec.plugins.launcher import load_launcher

START_TIMEOUT_S: Final = 120.0
"""Longest time from starting an agent (which may set up a container) to its lock."""


class AgentHandle(ABC):
    """The node agent of one job on one host.

    Each method may be called again after it failed; none blocks the event loop.
    """

    def __init__(
        self,
        launcher: Launcher,
        node: NodeJob,
        directory: PurePosixPath,
        variables: Mapping[str, str],
        writable: Sequence[Path],
        readable: Sequence[Path] = (),
    ) -> None:
        """Describe the agent of ``node`` whose files on the host are in ``directory``; nothing is started.

        It reads the directories ``readable`` in addition to the job's data.
        """
        self.launcher = launcher
        self.node = node
        self.directory = directory
        self.host = launcher.host(node.host)
        vendor = find("vendors", launcher.plan.vendor).path
        self.sandbox = job_sandbox(launcher.plan, node.job, launcher.code, launcher.path_on_host(vendor))
        round_dir, readable = node.node_dir.parent, (*readable, *node.job.data_dirs.values(), *model_files(node.job))
        name = f"{launcher.run_id}-{round_dir.parent.name}-{round_dir.name}-{node.task.noderank}"
        self.module = ModuleCommand(AGENT_MODULE, (str(directory),), name, variables, writable, readable)
        """The agent as a module to run in its sandbox."""
        self.command: Sequence[str] = self.sandbox.command(launcher.python, self.module)
        """The command on the host that runs the agent."""
        self.started_at = utc_now()
        self.exit_code: int | None = None
        """Of the command, where it was a child of this process."""

    @abstractmethod
    def commands(self) -> list[list[str]]:
        """Return, in order, all commands for the job on its host; those that the agent starts come last."""

    @abstractmethod
    async def prepare(self) -> None:
        """Deliver the agent's files to the host. Raises AccelmarkError: the host cannot run the job."""

    @abstractmethod
    async def start(self) -> None:
        """Start the agent so that it outlives the coordinator.

        Raises AccelmarkError: it could not be started; the host is named.
        """

    @abstractmethod
    async def attach(self) -> bool:
        """Find an agent that an earlier coordinator started; False where none was."""

    @abstractmethod
    async def wait(self) -> NodeExit:
        """Wait for the agent's end, copying its files here meanwhile.

        Only the agent's ``exit.json`` can mean success. Without it the job is lost, and its processes are ended.
        """

    @abstractmethod
    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end its ranks, or to kill them ``at_once``; :meth:`wait` returns soon after."""

    @property
    def logs(self) -> tuple[Path, ...]:
        """Files here that may contain why the agent did not start."""
        return (self.node.node_dir / AGENT_LOG,)

    async def ended(self, *, has_exit: bool = True) -> NodeExit:
        """Return the agent's record of its end; without a record, end its processes, and record that.

        An agent that never ran failed, any other is lost.
        """
        why = None
        try:
            if has_exit:
                return NodeExit.model_validate_json((self.node.node_dir / EXIT_FILE).read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            why = f"{EXIT_FILE} of the node agent cannot be read: {error}"
        num_ended = await self.end_processes()
        cause = await self._cause()
        if not (self.node.node_dir / IDENTITY_FILE).exists():
            return self.record("failed", explained(f"node agent could not start: {cause or 'it printed nothing'}"))
        left = f"; {num_ended} processes that it left behind were killed" if num_ended else ""
        why = why or f"node agent exited without writing {EXIT_FILE}{f': {cause}' if cause else ' (was it killed?)'}"
        return self.record("lost", explained(why) + left)

    async def _cause(self) -> str | None:
        """Return the cause of the end of an agent without a record, from its host or logs; None where it is unknown."""
        host: dict[str, Any] = {}
        with contextlib.suppress(HostError, ValueError):
            look = onhost.command(self.launcher.python, "state", str(self.directory))
            host = json.loads((await self.host.run(look)).out)
        agent = ProcessId.stored(self.node.node_dir / IDENTITY_FILE)
        if agent is not None and host.get("boot_id", agent.boot_id) != agent.boot_id:
            return f"the host was rebooted while the job ran (boot {agent.boot_id} ended, it is {host['boot_id']} now)"
        lines = [line.strip() for log in self.logs for line in tail(log) if line.strip()]
        if cause := cause_among([*host.get("messages", ()), *reversed(lines)]):
            return cause
        code = int(host["exit_code"]) if host.get("exit_code", "").isdigit() else self.exit_code
        if code is not None and (killer := signal_name(code)) is not None:
            return f"killed by {killer}"
        errors = [line for line in lines if "error" in line.lower()] or lines
        return f"last output: {errors[-1]}" if errors else None

    @property
    def clean_up(self) -> list[str]:
        """The command on the host that ends the processes of a dead agent, and may print their number."""
        launcher = self.launcher
        ending = self.module._replace(
            module="accelmark.run.processes",
            arguments=(str(self.directory),),
            environment=launcher.variables,
        )
        return self.sandbox.clean_up(launcher.python, ending)

    async def end_processes(self) -> int:
        """End a dead agent's processes on its host; returns their number, 0 where it is unknown."""
        done = await self.host.run(self.clean_up)
        return int(done.out) if done.code == 0 and done.out.strip().isdigit() else 0

    def sandbox_command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark in the sandbox of the job, before its files exist."""
        agent, data = self.module, self.node.job.data_dirs.values()
        readable = [path for path in agent.readable if path.is_dir() and path not in data]
        command = agent._replace(module=module, arguments=arguments, name=f"{agent.name}-preflight", readable=readable)
        return self.sandbox.command(self.launcher.python, command)

    def record(self, state: Literal["lost", "failed", "cancelled"], reason: str) -> NodeExit:
        """Write ``exit.json`` where the agent did not, for later coordinators."""
        task = self.node.task
        end = NodeExit(
            host=task.host,
            noderank=task.noderank,
            state=state,
            reason=reason,
            started_at=self.started_at,
            duration_s=0.0,
            ranks=(),
        )
        with contextlib.suppress(RunError):
            make_directory(self.node.node_dir)
            write_atomic(self.node.node_dir / EXIT_FILE, end.model_dump_json(indent=2))
        return end


class Launcher(contextlib.AbstractAsyncContextManager["Launcher"]):
    """Starts node agents on the hosts of a plan's cluster, for the run in ``run`` here; its context closes it."""

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
        self.run_id = run.name
        """The name of the run on its hosts, which no other run has."""
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
    def agents(self, nodes: Sequence[NodeJob]) -> Sequence[AgentHandle]:
        """Return the agents of a job on all of its hosts; nothing is started yet."""

    def common_commands(self, nodes: Sequence[NodeJob]) -> list[list[str]]:
        """Return the commands that run on this machine and start the agents of a job on all of its hosts."""
        return []

    def allocation_commands(self) -> list[list[str]]:
        """Return the commands that run on this machine before any host is reached."""
        return []

    async def allocate(self) -> None:
        """Ensure that hosts may be used; raises RunError if there is no allocation."""

    async def allocation_end(self) -> tuple[NodeState, str] | None:
        """Return the state and the reason of an allocation that ended by itself; None while it lasts."""
        return None

    async def deliver(self, host: HostSpec) -> None:
        """Ensure that AccelMark is on a host; raises HostError if it could not be delivered."""

    async def master_address(self, host: HostSpec) -> str:
        """Return the address of rank 0 on ``host`` for ranks on other hosts."""
        return host.address

    def path_on_host(self, path: Path) -> Path:
        """Return the path on the hosts of a plug-in's folder, or of a file inside it."""
        return path

    def native_command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark on a host itself."""
        return Sandbox().command(self.python, ModuleCommand(module, arguments, "", self.variables))

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run without a coordinator; returns one message for each host that was not reached."""
        return []

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def abort(self) -> None:
        """Return allocations without waiting: the process is about to exit at once."""

    async def close(self) -> None:
        """Close connections and return allocations; agents continue."""
