"""Launch node agents on hosts with this machine's file system at the same paths: this machine, nodes of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.results.store.loaded_run import PLAN_FILE
from accelmark.run.agent.agent import agent_commands
from accelmark.run.agent.task import AGENT_LOG, EXIT_FILE, LOCK_FILE, STOP_FILES, TASK_FILE, NodeJob
from accelmark.run.host import HostError, SubprocessHost
from accelmark.run.launchers.launcher import START_TIMEOUT_S, AgentHandle, Launcher
from accelmark.run.onhost.program import is_locked
from accelmark.run.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.sandboxes.sandbox import ensure_image
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError, raising
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from accelmark.spec.secret import secrets_in

POLL_S: Final = 0.2
"""Interval between checks of the agents' files."""
_SETTLE_S: Final = 3.0
"""Longest time from the end of the agent's command until its last files are visible here."""


class SharedFilesystemLauncher(Launcher):
    """Base class of launchers whose hosts share this machine's file system.

    A subclass states how a command is run on a host (:meth:`prefix`).
    """

    code = PurePosixPath(__file__).parents[3]

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self.visible_file = None if self.spec.is_localhost else run / PLAN_FILE

    def prefix(self, host: HostSpec) -> tuple[str, ...]:
        """Return the arguments that run a command on a host."""
        return ()

    @property
    def variables(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(self.code)}

    def host(self, spec: HostSpec) -> SubprocessHost:
        return SubprocessHost(spec, self.prefix)

    def agents(self, nodes: Sequence[NodeJob]) -> Sequence[CommandAgent]:
        return [CommandAgent(self, node) for node in nodes]


class CommandAgent(AgentHandle):
    """A node agent that a command starts (Python itself, a container engine)."""

    def __init__(self, launcher: Launcher, node: NodeJob) -> None:
        plugins = os.environ.get(PLUGINS_VARIABLE, "")
        markers = {RUN_MARKER: node.task.run, NODE_MARKER: str(node.node_dir)}
        folders = [
            node.job.case.path.parent,
            *([node.task.telemetry.vendor_folder] if node.task.telemetry is not None else []),
            *(Path(place).absolute() for place in filter(None, plugins.split(os.pathsep))),
        ]
        variables = {**markers, **launcher.variables, **({PLUGINS_VARIABLE: plugins} if plugins else {})}
        super().__init__(launcher, node, PurePosixPath(node.node_dir), variables, (launcher.run,), folders)
        self._process: subprocess.Popen[bytes] | None = None

    def commands(self) -> list[list[str]]:
        """Return the commands that ensure the image, start the agent, and are started by it."""
        steps = [*self.sandbox.image_commands(), [*self.command]]
        started = agent_commands(self.node.task, self.node.job, self.node.node_dir, self.launcher.rank_python)
        return [*map(self.host.command, steps), *started]

    async def prepare(self) -> None:
        """Write the agent's task, and ensure that the host may be used and has the image."""
        task, directory = self.node.task, self.node.node_dir
        make_directory(directory)
        private = any(secrets_in(task.model_dump(mode="json")))
        write_atomic(directory / TASK_FILE, task.model_dump_json(indent=2), private=private)
        await self.launcher.allocate()
        if self.sandbox.image is not None:
            await ensure_image(self.sandbox.image, self.host, directory)

    async def start(self) -> None:
        """Start the agent in its own session, so that neither Ctrl-C nor the coordinator's end reaches it."""
        argv, node_dir = self.host.command(self.command), self.node.node_dir
        missing = raising(RunError, f"{self.node.host.name}: {argv[0]} is not on the PATH", FileNotFoundError)
        with write_errors(node_dir / AGENT_LOG), (node_dir / AGENT_LOG).open("ab") as log, missing:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=node_dir, start_new_session=True
            )

    async def attach(self) -> bool:
        """Return whether an agent was ever started for this job."""
        return (self.node.node_dir / AGENT_LOG).exists()

    async def stop(self, *, at_once: bool) -> None:
        """Write a stop file; the agent checks for it at least once a second."""
        with contextlib.suppress(OSError):
            (self.node.node_dir / STOP_FILES[at_once]).touch()

    async def wait_for_end(self) -> None:
        """Wait until the agent's command has ended, or without it until the agent has."""
        if self._process is not None:
            while self._process.poll() is None:
                await asyncio.sleep(0.02)
            self.exit_code = self._process.returncode
            return
        deadline = time.monotonic() + START_TIMEOUT_S
        while (locked := is_locked(str(self.node.node_dir / LOCK_FILE))) or (
            locked is None and time.monotonic() < deadline
        ):
            await asyncio.sleep(POLL_S)

    async def wait(self) -> NodeExit:
        """Wait until the agent has ended, then read ``exit.json``."""
        await self.wait_for_end()
        lock = str(self.node.node_dir / LOCK_FILE)
        settled_by = time.monotonic() + _SETTLE_S
        while not (self.node.node_dir / EXIT_FILE).exists() and time.monotonic() < settled_by:
            if is_locked(lock):
                settled_by = time.monotonic() + _SETTLE_S  # the agent outlives the command that started it
            await asyncio.sleep(POLL_S)
        return await self.ended()

    async def end_processes(self) -> int:
        """End a dead agent's processes, if its host still runs commands."""
        try:
            return await super().end_processes()
        except HostError:
            return 0
