"""One job on one host over SSH: brought there, started, followed through losses of the connection, ended."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING, Final, final

from accelmark.run.agent.task import AGENT_LOG, IDENTITY_FILE, TASK_FILE
from accelmark.run.launchers.agent_exit import SILENT, failed_node, kept, last_word, lost_node, said
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.ssh.connection import HostError, UnreachableError
from accelmark.run.launchers.ssh.deliver import put_files
from accelmark.run.launchers.ssh.stream import AgentEnd, Stream, seen_here
from accelmark.run.onhost import start_command
from accelmark.run.record.states import utc_now
from accelmark.spec.job import NodeExit

if TYPE_CHECKING:
    from accelmark.run.launchers.ssh.launcher import SshLauncher

STOP_PATIENCE_S: Final = 30.0
"""Longest time to look for a host that is out of reach once the run is to end."""
LONGEST_PAUSE_S: Final = 5.0
_DATA_TIMEOUT_S: Final = 4 * 3600.0


@final
class SshLink:
    """One job on one host."""

    def __init__(self, work: NodeWork, launcher: SshLauncher) -> None:
        self._work = work
        self._launcher = launcher
        self._host = launcher.host(work.host)
        self._python = launcher.plan.cluster.python
        self._remote = launcher.layout.node_dir(work)
        in_place = launcher.layout.home is not None
        self._stream = Stream(self._host, self._python, str(self._remote), work.node_dir, in_place=in_place)
        self._stop_by: float | None = None
        self._started_at = utc_now()

    @property
    def work(self) -> NodeWork:
        """What this link is for."""
        return self._work

    async def prepare(self) -> None:
        """Bring AccelMark, the image, the job and its data to the host.

        Raises:
            HostError: the host cannot take the job.
        """
        layout, work = self._launcher.layout, self._work
        try:
            await self._launcher.make_room(work)
            await self._launcher.ready(work)
            files = {
                layout.job_file(work): layout.job(work).model_dump_json(indent=2),
                self._remote / TASK_FILE: layout.task(work).model_dump_json(indent=2),
            }
            await put_files(self._host, self._python, files)
            if layout.home is not None:
                written = hashlib.sha256(files[self._remote / TASK_FILE].encode()).hexdigest()
                await seen_here(self._host.name, work.node_dir / TASK_FILE, written)
            await self._bring_data()
        except UnreachableError as error:  # nothing was started: not lost
            raise HostError(error.host, error.what) from error

    async def _bring_data(self) -> None:
        argv = self._launcher.data_command(self._work)
        if argv is None:
            return
        if self._launcher.plan.cluster.container is not None:
            parents = (str(path.parent) for path in self._work.job.data_dirs.values())
            await self._host.run(["mkdir", "-p", "--", *parents])
        done = await self._host.run(argv, timeout_s=_DATA_TIMEOUT_S)
        if done.code != 0:
            raise HostError(self._host.name, f"its data is not there: {done.said}")
        self._launcher.keep_data(self._work, done.out.decode(errors="replace").strip().splitlines()[-1])

    async def start(self) -> None:
        """Start the agent so that it outlives the connection; doing so twice starts one.

        Raises:
            UnreachableError: it may have been started.
            HostError: it was not.
        """
        sandbox = self._launcher.enclosure(self._work).sandbox
        argv = sandbox.command(self._python, self._launcher.agent(self._work))
        done = await self._host.run(start_command(str(self._remote), argv))
        if done.code != 0:
            raise HostError(self._host.name, f"the node agent could not be started: {done.said}")

    async def attach(self) -> bool:
        """Tell whether an agent was ever started; a host that is out of reach now is asked again by :meth:`wait`."""
        try:
            done = await self._host.run(["test", "-d", str(self._remote / ".started")])
        except UnreachableError:
            return True
        return done.code == 0

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end; where its host is out of reach, it is asked as soon as that is back."""
        self._stop_by = time.monotonic() + STOP_PATIENCE_S * (0.3 if at_once else 1)
        self._stream.ask(at_once=at_once)

    async def wait(self) -> NodeExit:
        """Bring files home until the agent has ended, through any loss of connection that is not too long."""
        gone_since: float | None = None
        pause_s = 0.2
        while True:
            begun = time.monotonic()
            try:
                end = await self._stream.to_the_end()
                return await self._last_word(end)
            except UnreachableError as error:
                now = time.monotonic()
                if gone_since is None or now - begun > 2 * self._patience_s:
                    gone_since, pause_s = now, 0.2
                patience_s = self._patience_s
                if now - gone_since > patience_s or (self._stop_by is not None and now > self._stop_by):
                    self._launcher.give_up(self._work)
                    why = f"was out of reach for {now - gone_since:.0f} s: {error.what}"
                    return self._lost(f"{why}; what still runs there is ended when the host is back")
            except HostError as error:
                return self._lost(error.what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @property
    def _patience_s(self) -> float:
        return self._launcher.plan.cluster.reconnect_s

    async def _last_word(self, end: AgentEnd) -> NodeExit:
        node_dir = self._work.node_dir
        if end == "never":
            return self._lost("its node agent was never started")
        word = last_word(node_dir) if end == "exit" else SILENT
        if isinstance(word, NodeExit):
            return word
        num_swept = await self._clean_up()
        last = said(node_dir / AGENT_LOG)
        if end == "dead" and not (node_dir / IDENTITY_FILE).exists():
            return self._keep(failed_node(self._work, f"the node agent could not begin{last}", self._started_at))
        if num_swept:
            word += f"; {num_swept} processes it left behind were ended"
        return self._lost(word + last)

    async def _clean_up(self) -> int:
        """End what a dead agent left behind on its host; returns how many processes that were."""
        enclosure = self._launcher.enclosure(self._work)
        agent = self._launcher.agent(self._work)
        by_force = enclosure.sandbox.clean_up(agent.name)
        environment = {"PYTHONPATH": agent.environment["PYTHONPATH"]}
        sweeping = ["env", *(f"{name}={value}" for name, value in environment.items()), self._python]
        done = await self._host.run(by_force or [*sweeping, "-m", "accelmark.run.agent.sweep", str(self._remote)])
        await self._stream.to_the_end()
        return int(done.out) if by_force is None and done.code == 0 and done.out.strip().isdigit() else 0

    def _lost(self, reason: str) -> NodeExit:
        return self._keep(lost_node(self._work, reason, self._started_at))

    def _keep(self, end: NodeExit) -> NodeExit:
        return kept(self._work.node_dir, end)
