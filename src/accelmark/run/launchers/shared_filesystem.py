"""Launch node agents on hosts with this machine's file system at the same paths: this machine, nodes of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.run.agent.agent import agent_commands
from accelmark.run.agent.task import (
    AGENT_LOG,
    AGENT_MODULE,
    EXIT_FILE,
    IDENTITY_FILE,
    LOCK_FILE,
    STOP_FILES,
    TASK_FILE,
    NodeJob,
)
from accelmark.run.launchers.agent_exit import last_error, read_exit, save_exit, unreported_exit
from accelmark.run.launchers.host import PreflightHost, SubprocessHost
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost.follow import is_locked
from accelmark.run.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.record.directory import PLAN_FILE
from accelmark.run.record.states import utc_now
from accelmark.run.sandboxes.image import ensure_image
from accelmark.run.sandboxes.job_sandbox import JobSandbox, job_sandbox, model_files
from accelmark.run.sandboxes.sandbox import ModuleCommand
from accelmark.spec.catalog import PLUGINS_VARIABLE, find
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit
from accelmark.spec.secret import secrets_in

_POLL_S: Final = 0.2
_START_TIMEOUT_S: Final = 120.0
"""Longest time from starting an agent (a container may have to be set up) to its lock."""
_SETTLE_S: Final = 3.0
"""Longest time from the end of the agent's command until its last files are visible here."""


class SharedFilesystemLauncher(Launcher):
    """Base class of launchers whose hosts share this machine's file system.

    A subclass states how a command is run on a host (:meth:`prefix`).
    """

    def prefix(self, host: HostSpec) -> tuple[str, ...]:
        """Return the arguments that run a command on a host."""
        return ()

    async def allocate(self) -> None:
        """Ensure that hosts may be used.

        Raises:
            RunError: they may not.
        """

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where this AccelMark is."""
        return {"PYTHONPATH": str(source_directory())}

    def host_command(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command with its prefix."""
        return [*self.prefix(host), *argv]

    async def hosts(self, specs: Sequence[HostSpec]) -> Sequence[PreflightHost]:
        """Return hosts that have been allocated."""
        await self.allocate()
        return [
            SubprocessHost(
                spec=spec,
                address=self.master_address(spec),
                python=self.python,
                work_directory=str(self.run),
                variables=self.variables,
                sandbox_command=self.sandbox_command,
                prefix=self.prefix(spec),
                visible_file=None if self.spec.is_localhost else self.run / PLAN_FILE,
            )
            for spec in specs
        ]

    def agent(self, node: NodeJob) -> CommandAgent:
        """Return the agent of a job on one host."""
        sandbox, agent = self._sandbox(node), self._agent(node)

        async def prepare() -> None:
            await self.allocate()
            if sandbox.image is not None:
                await ensure_image(sandbox.image, node.host.name, self._run_on(node.host), node.node_dir)

        async def clean_up() -> int:
            removal = sandbox.sandbox.removal(agent.name)
            if removal is not None:
                await self._run_on(node.host)(removal)
            return 0

        return CommandAgent(
            node, lambda: self.host_command(node.host, sandbox.sandbox.command(self.python, agent)), prepare, clean_up
        )

    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return the commands that ensure the image, start the agent, and are started by it."""
        sandbox = self._sandbox(node)
        steps = [*sandbox.image_commands(), sandbox.sandbox.command(self.python, self._agent(node))]
        started = agent_commands(node.task, node.node_dir, self.rank_python)
        return [*(self.host_command(node.host, step) for step in steps), *started]

    def sandbox_command(self, node: NodeJob, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark in the sandbox of a job, before its files exist."""
        agent = self._agent(node)
        readable = [path for path in agent.readable if path.is_dir() and path not in node.job.data_dirs.values()]
        command = replace(agent, module=module, arguments=arguments, name=f"{agent.name}-preflight", readable=readable)
        return self._sandbox(node).sandbox.command(self.python, command)

    def _sandbox(self, node: NodeJob) -> JobSandbox:
        vendor = find("vendors", self.plan.vendor).path
        return job_sandbox(self.plan, node.job, PurePosixPath(source_directory()), vendor)

    def _agent(self, node: NodeJob) -> ModuleCommand:
        plugins = os.environ.get(PLUGINS_VARIABLE, "")
        environment = {**agent_markers(node), **self.variables}
        if plugins:
            environment[PLUGINS_VARIABLE] = plugins
        folders = [
            node.job.case.path.parent,
            *([node.task.telemetry.vendor_folder] if node.task.telemetry is not None else []),
            *(Path(place).absolute() for place in filter(None, plugins.split(os.pathsep))),
        ]
        return ModuleCommand(
            module=AGENT_MODULE,
            arguments=(str(node.node_dir),),
            name=node.unique_name(self.run.name),
            environment=environment,
            writable=(self.run,),
            readable=(*folders, *node.job.data_dirs.values(), *model_files(node.job)),
        )

    def _run_on(self, host: HostSpec) -> Callable[[Sequence[str]], Awaitable[tuple[int, str]]]:
        return lambda argv: output_of(self.host_command(host, argv))


@final
class CommandAgent:
    """A node agent that a command starts (Python itself, a container engine, ``srun``).

    Args:
        node: the job on its host.
        command: returns the command that runs the agent.
        prepare: awaited before the start.
        clean_up: ends what a dead agent left behind; returns the number of processes.
    """

    def __init__(
        self,
        node: NodeJob,
        command: Callable[[], Sequence[str]],
        prepare: Callable[[], Awaitable[None]] | None = None,
        clean_up: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._node = node
        self._command = command
        self._prepare = prepare
        self._clean_up = clean_up
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = utc_now()

    @property
    def node(self) -> NodeJob:
        """The agent's job on its host."""
        return self._node

    async def prepare(self) -> None:
        """Write ``agent.json``, and ensure that the sandbox exists."""
        make_directory(self._node.node_dir)
        private = any(secrets_in(self._node.task.model_dump(mode="json")))
        write_atomic(self._node.node_dir / TASK_FILE, self._node.task.model_dump_json(indent=2), private=private)
        if self._prepare is not None:
            await self._prepare()

    async def start(self) -> None:
        """Start the agent in its own session, so that neither Ctrl-C nor the coordinator's end reaches it.

        Raises:
            RunError: its program is not installed, or the log cannot be written.
        """
        argv, log = self._command(), self._node.node_dir / AGENT_LOG
        with write_errors(log), log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self._node.node_dir,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise RunError(f"{self._node.host.name}: {argv[0]} is not on the PATH") from error

    async def attach(self) -> bool:
        """Return whether an agent was ever started for this job."""
        return (self._node.node_dir / AGENT_LOG).exists()

    async def stop(self, *, at_once: bool) -> None:
        """Write a stop file; the agent checks for it at least once a second."""
        with contextlib.suppress(OSError):
            (self._node.node_dir / STOP_FILES[at_once]).touch()

    async def wait(self) -> NodeExit:
        """Wait until the agent has ended, then read ``exit.json``."""
        lock = str(self._node.node_dir / LOCK_FILE)
        if self._process is not None:
            await _end_of(self._process)
        else:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while (locked := is_locked(lock)) or (locked is None and time.monotonic() < deadline):
                await asyncio.sleep(_POLL_S)
        settled_by = time.monotonic() + _SETTLE_S
        while not (self._node.node_dir / EXIT_FILE).exists() and time.monotonic() < settled_by:
            if is_locked(lock):
                settled_by = time.monotonic() + _SETTLE_S  # the agent outlives the command that started it
            await asyncio.sleep(_POLL_S)
        return await self._read_exit()

    async def _read_exit(self) -> NodeExit:
        node_dir = self._node.node_dir
        found = read_exit(node_dir)
        if isinstance(found, NodeExit):
            return found
        num_ended = await self._clean_up() if self._clean_up is not None else 0
        last = last_error(node_dir / AGENT_LOG)
        if (node_dir / IDENTITY_FILE).exists():
            left = f"; {num_ended} processes that it left behind were killed" if num_ended else ""
            end = unreported_exit(self._node, "lost", found + left + last, self._started_at)
        else:
            end = unreported_exit(self._node, "failed", f"node agent could not start{last}", self._started_at)
        save_exit(node_dir, end)
        return end


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child process without polling."""
    descriptor = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


def agent_markers(node: NodeJob) -> dict[str, str]:
    """Return the variables that mark every process of a job on one host."""
    return {RUN_MARKER: node.task.run, NODE_MARKER: str(node.node_dir)}


async def output_of(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command on this machine; returns its exit code and its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        return 127, f"{argv[0]} is not on the PATH"
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace")


def source_directory() -> Path:
    """Return the directory that this AccelMark is imported from."""
    return Path(__file__).parents[3]
