"""The node agent of one job on one host, as the coordinator drives it, and the record of its end."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import signal_name, tail
from accelmark.run.agent.task import AGENT_LOG, EXIT_FILE, IDENTITY_FILE, NodeJob
from accelmark.run.causes import cause_among, explained
from accelmark.run.host import Host, HostError
from accelmark.run.processes import ProcessId
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit

START_TIMEOUT_S: Final = 120.0
"""Longest time from starting an agent (which may set up a container) to its lock."""
_NO_EXIT_FILE: Final = f"node agent exited without writing {EXIT_FILE}"


@dataclass(eq=False)
class AgentHandle(ABC):
    """The node agent of one job on one host.

    Each method may be called again after it failed; none blocks the event loop.
    """

    node: NodeJob
    """The agent's job on its host."""
    host: Host
    command: Sequence[str]
    """The command on the host that runs the agent."""
    clean_up: Sequence[str]
    """The command on the host that ends a dead agent's processes, and may print their number."""
    look: Sequence[str]
    """The command on the host that reports possible causes of an agent's end: the verb ``state`` of ``onhost``."""
    prepare: Callable[[], Awaitable[None]]
    """Delivers the agent's files to the host; raises AccelmarkError if the host cannot run the job."""
    started_at: str = field(default_factory=utc_now, init=False)
    exit_code: int | None = field(default=None, init=False)
    """Of the command, where it was a child of this process."""

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
        ending = why or (f"{_NO_EXIT_FILE}: {cause}" if cause else f"{_NO_EXIT_FILE} (was it killed?)")
        return self.record("lost", explained(ending) + left)

    async def _cause(self) -> str | None:
        """Return the cause of the end of an agent without a record, from its host or logs; None where it is unknown."""
        host: dict[str, Any] = {}
        with contextlib.suppress(HostError, ValueError):
            host = json.loads((await self.host.run(self.look)).out)
        agent = ProcessId.read(self.node.node_dir / IDENTITY_FILE)
        if agent is not None and host.get("boot_id", agent.boot_id) != agent.boot_id:
            return f"the host was rebooted while the job ran (boot {agent.boot_id} ended, it is {host['boot_id']} now)"
        lines = [line for log in self.logs for line in tail(log) if line.strip()]
        code = int(host["exit_code"]) if host.get("exit_code", "").isdigit() else self.exit_code
        killer = signal_name(code) if code is not None else None
        ending = f"killed by {killer}" if killer is not None else None
        return cause_among([*host.get("messages", ()), *reversed(lines)]) or ending or _last_error(lines)

    async def end_processes(self) -> int:
        """End a dead agent's processes on its host; returns their number, 0 where it is unknown."""
        done = await self.host.run(self.clean_up)
        return int(done.out) if done.code == 0 and done.out.strip().isdigit() else 0

    @property
    def logs(self) -> tuple[Path, ...]:
        """Files here that may contain why the agent did not start."""
        return (self.node.node_dir / AGENT_LOG,)

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


def _last_error(lines: Sequence[str]) -> str | None:
    """Return ``last output: …`` with the last line that names an error, else the last line; None without lines."""
    chosen = [line for line in lines if "error" in line.lower()] or lines
    return f"last output: {chosen[-1].strip()}" if chosen else None
