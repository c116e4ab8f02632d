"""Launching on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from accelmark.run.agent.environment import agent_commands
from accelmark.run.agent.processes import NODE_MARKER, RUN_MARKER, ProcessId, sweep
from accelmark.run.agent.task import AGENT_LOG, EXIT_FILE, IDENTITY_FILE, TASK_FILE
from accelmark.run.launchers.agent_exit import kept, last_word, lost_node, said
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.local.localhost import ThisMachine
from accelmark.run.launchers.place import HerePlace, Place
from accelmark.run.launchers.step import start_detached, write_task
from accelmark.run.record.states import utc_now
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import NodeExit

_BIRTH_S: Final = 30.0
"""Longest time an agent may take from its start to its identity file."""
_POLL_S: Final = 0.1


@final
class LocalLauncher(ThisMachine):
    """Starts agents as processes of this machine that outlive the coordinator."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def link(self, work: NodeWork) -> LocalLink:
        """Return the link for a job's part on this machine."""
        return LocalLink(work)

    def describe(self, work: NodeWork) -> list[list[str]]:
        """Return the command that starts the agent, and those that the agent starts."""
        return [agent_command(work), *agent_commands(work.task, work.node_dir)]

    async def places(self, hosts: Sequence[HostSpec]) -> Sequence[Place]:
        """Return this machine."""
        return [HerePlace(host, "127.0.0.1", self.python, str(self._run), self.variables, _as_it_is) for host in hosts]


@final
class LocalLink:
    """One job on this machine."""

    def __init__(self, work: NodeWork) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = utc_now()

    @property
    def work(self) -> NodeWork:
        """What this link is for."""
        return self._work

    async def prepare(self) -> None:
        """Write ``agent.json``; ``job.json`` is in the run directory already."""
        write_task(self._work)

    async def start(self) -> None:
        """Start the agent in a session of its own, so that neither Ctrl-C nor a closed terminal reaches it."""
        node_dir = self._work.node_dir
        environment = os.environ | {RUN_MARKER: self._work.task.run, NODE_MARKER: str(node_dir)}
        if "PYTHONPATH" in environment:  # the agent works in another directory
            entries = environment["PYTHONPATH"].split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries if entry)  # noqa: PTH100
        self._process = start_detached(self._work, agent_command(self._work), environment)

    async def attach(self) -> bool:
        """Tell whether an agent was ever started for this job: :meth:`wait` then finds it, or its last word."""
        return (self._work.node_dir / TASK_FILE).exists() and (
            self._identity() is not None or (self._work.node_dir / EXIT_FILE).exists()
        )

    async def wait(self) -> NodeExit:
        """Wait until the agent is gone, then read its last word."""
        if self._process is not None:
            await _gone(self._process.pid)
            self._process.wait()
        else:
            identity = self._identity()
            if identity is not None and identity.alive:
                await _gone(identity.pid)
        return await self._last_word()

    async def stop(self, *, at_once: bool) -> None:
        """Send SIGTERM to the agent, twice for at once, and wait for it to know its name first."""
        identity = await self._born()
        if identity is None:
            return
        identity.send(signal.SIGTERM)
        if at_once:
            await asyncio.sleep(_POLL_S)
            identity.send(signal.SIGTERM)

    async def _born(self) -> ProcessId | None:
        """Return the agent's identity, which it writes once it listens to signals, or None where it is gone."""
        for _ in range(round(_BIRTH_S / _POLL_S)):
            identity = self._identity()
            if identity is not None:
                return identity
            if self._process is None or self._process.poll() is not None:
                return None
            await asyncio.sleep(_POLL_S)
        return None

    def _identity(self) -> ProcessId | None:
        return ProcessId.read(self._work.node_dir / IDENTITY_FILE)

    async def _last_word(self) -> NodeExit:
        word = last_word(self._work.node_dir)
        if isinstance(word, NodeExit):
            return word
        num_swept = await asyncio.to_thread(sweep, self._work.node_dir)
        left = f"; {num_swept} processes it left behind were ended" if num_swept else ""
        reason = word + left + said(self._work.node_dir / AGENT_LOG)
        return kept(self._work.node_dir, lost_node(self._work, reason, self._started_at))


def _as_it_is(_work: NodeWork, module: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def agent_command(work: NodeWork) -> list[str]:
    """Return the arguments that start the agent with the Python that runs here."""
    return [sys.executable, "-m", "accelmark.run.agent.agent", str(work.node_dir)]


async def _gone(pid: int) -> None:
    """Wait until the process ends, without polling; also for processes that are not our children."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
