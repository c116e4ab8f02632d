"""The node agent of one job on one host over SSH: started, followed through lost connections, ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

from accelmark.run.host import HostError, UnreachableError
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.ssh.stream import NodeStream
from accelmark.run.onhost import command, start_command
from accelmark.run.onhost.files import REFUSED
from accelmark.spec.errors import RequestError
from accelmark.spec.job import NodeExit
from accelmark.spec.number_format import duration

STOP_TIMEOUT_S: Final = 30.0
"""Longest time to reconnect to a host once the run is to end."""
LONGEST_PAUSE_S: Final = 5.0


@final
@dataclass(eq=False, kw_only=True)
class SshAgent(AgentHandle):
    """The agent of a job on one host."""

    stream: NodeStream
    """Copies its files here."""
    reconnect_s: float
    """Longest time that the host may be unreachable before the job is lost."""
    abandon: Callable[[], None]
    """Called where the job is lost, to end the agent later."""
    report: Callable[[str], None]
    """Called with a message for the user where the connection is lost, and where the host answers again."""
    _stop_by: float | None = field(default=None, init=False)
    _lost_since: float = field(default=-math.inf, init=False)
    _is_lost: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.stream.answered = self._answered

    def _answered(self) -> None:
        if self._is_lost:
            self._is_lost = False
            self.report(f"{self.host.name} answers again after {duration(time.monotonic() - self._lost_since)}")

    async def start(self) -> None:
        """Start the agent so that it outlives the connection; a second call starts no second agent.

        Raises:
            UnreachableError: the connection was lost; the agent may have started.
            HostError: it was not started.
        """
        done = await self.host.run(start_command(self.stream.remote, self.command))
        if done.code != 0:
            raise HostError(self.host.name, f"the node agent could not be started: {done.message}")

    async def attach(self) -> bool:
        """Return whether an agent was ever started; True where that cannot be read: :meth:`wait` retries.

        Raises RequestError: another coordinator follows it, for which this run's directory is a copy.
        """
        try:
            done = await self.host.run(command(self.stream.python, "started", self.stream.remote, self.stream.owner))
        except HostError:
            return True
        if done.code == REFUSED:
            raise RequestError(f"{self.host.name}: {done.message}")
        return done.code == 0

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end, as soon as its host can be reached."""
        self._stop_by = time.monotonic() + STOP_TIMEOUT_S * (0.3 if at_once else 1)
        self.stream.ask(at_once=at_once)

    async def wait(self) -> NodeExit:
        """Copy files until the agent has ended, reconnecting for ``reconnect_s`` after each lost connection."""
        pause_s = 0.2
        while True:
            try:
                end = await self.stream.follow()
                if end == "never":
                    return self.record("lost", "its node agent was never started")
                return await self.ended(has_exit=end == "exit")
            except UnreachableError as error:
                now = time.monotonic()
                if self.stream.heard_at >= self._lost_since:
                    self._lost_since, pause_s = now, 0.2  # it was reachable since the last outage: this is another one
                    self._is_lost = True
                    limit = duration(self.reconnect_s)
                    self.report(f"{self.host.name}: {error.what}; trying again for {limit}, its ranks may continue")
                if now - self._lost_since > self.reconnect_s or (self._stop_by is not None and now > self._stop_by):
                    self.abandon()
                    why = f"unreachable for {now - self._lost_since:.0f} s: {error.what}"
                    return self.record("lost", f"{why}; processes still running there are ended once it can be reached")
            except HostError as error:
                self.abandon()
                return self.record("lost", error.what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def end_processes(self) -> int:
        """End a dead agent's processes, and copy its last files."""
        num_ended = await super().end_processes()
        await self.stream.follow()
        return num_ended
