"""The node agent of one job on one host, as the coordinator drives it, and the record of its end."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import tail
from accelmark.run.agent.task import AGENT_LOG, EXIT_FILE, IDENTITY_FILE, NodeJob
from accelmark.run.host import Host, HostError
from accelmark.run.processes import BOOT_ID, ProcessId
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit

START_TIMEOUT_S: Final = 120.0
"""Longest time from starting an agent (a container may have to be set up) to its lock."""
_NO_EXIT_FILE: Final = f"node agent exited without writing {EXIT_FILE} (was it killed?)"


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
    """The command on the host that ends what a dead agent left behind, and may print a number of processes."""
    prepare: Callable[[], Awaitable[None]]
    """Delivers to the host what the agent needs; raises AccelmarkError if the host cannot run the job."""
    started_at: str = field(default_factory=utc_now, init=False)

    @abstractmethod
    async def start(self) -> None:
        """Start the agent so that it outlives the coordinator.

        Raises:
            AccelmarkError: it could not be started; the host is named.
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
        """Return what the agent recorded of its end; without a record, end what it left behind, and record that.

        An agent that never ran failed, any other is lost.
        """
        why = _NO_EXIT_FILE
        try:
            if has_exit:
                return NodeExit.model_validate_json((self.node.node_dir / EXIT_FILE).read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            why = f"{EXIT_FILE} of the node agent cannot be read: {error}"
        num_ended = await self.end_processes()
        why = await self._reboot() or why
        last = next(filter(None, map(_last_error, self.logs)), "")
        if not (self.node.node_dir / IDENTITY_FILE).exists():
            return self.record("failed", f"node agent could not start{last}")
        left = f"; {num_ended} processes that it left behind were killed" if num_ended else ""
        return self.record("lost", why + left + last)

    async def _reboot(self) -> str | None:
        """Return a message where the host was booted after the agent started; None where it was not, or is unknown."""
        agent = ProcessId.read(self.node.node_dir / IDENTITY_FILE)
        with contextlib.suppress(HostError):
            booted = (await self.host.run(["cat", str(BOOT_ID)])).out.decode(errors="replace").strip()
            if agent is not None and booted and booted != agent.boot_id:
                return f"the host was rebooted while the job ran (boot {agent.boot_id} ended, it is {booted} now)"
        return None

    async def end_processes(self) -> int:
        """End what a dead agent left behind on its host; returns the number of processes, 0 where it is unknown."""
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


def _last_error(log: Path) -> str:
    """Return ``; last output: …`` with the last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in tail(log) if line.strip()]
    chosen = [line for line in lines if "error" in line.lower()] or lines
    return f"; last output: {chosen[-1]}" if chosen else ""
