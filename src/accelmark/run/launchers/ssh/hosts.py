"""The hosts of one run over SSH: connections, delivery of code and images, removal of earlier attempts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.task import AGENT_MODULE, NodeJob
from accelmark.run.launchers.host import CommandResult, HostError, HostProcess, PreflightHost
from accelmark.run.launchers.ssh.connection import SshConnection, library
from accelmark.run.launchers.ssh.deliver import deliver
from accelmark.run.launchers.ssh.layout import Layout
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.launchers.ssh.wheel import PLUGINS, path_on_host, wheel
from accelmark.run.onhost import command
from accelmark.run.sandboxes.image import ensure_image
from accelmark.run.sandboxes.job_sandbox import JobSandbox, job_sandbox, model_files
from accelmark.run.sandboxes.sandbox import ModuleCommand
from accelmark.spec.catalog import PLUGINS_VARIABLE, find
from accelmark.spec.cluster import HostSpec
from accelmark.spec.plugins.launcher import options_of
from accelmark.spec.records import DATA_FILE

if TYPE_CHECKING:
    import asyncssh

STOP_TIMEOUT_S: Final = 30.0
"""Longest time to reconnect to a host once the run is to end."""
LONGEST_PAUSE_S: Final = 5.0
_IMAGE_TIMEOUT_S: Final = 3600.0
_CLEAR_TIMEOUT_S: Final = 90.0


@final
class SshHosts:
    """Connections to the hosts of a plan's cluster, and their state of preparation for jobs."""

    def __init__(self, plan: Plan, run: Path) -> None:
        self.plan = plan
        self.options = options_of(Options, plan.cluster)
        self.layout = Layout.of(plan, run, self.options)
        self.python = plan.cluster.python
        self._connections = {host.name: SshConnection(host, self.options) for host in plan.cluster.hosts}
        self._locks = {name: asyncio.Lock() for name in self._connections}
        self._present: set[tuple[str, str]] = set()
        """Hosts, and the code or image that is known to be on them."""
        self._clearing = {name: asyncio.Lock() for name in self._connections}
        self._lost: dict[str, set[PurePosixPath]] = {}
        """Node directories on lost hosts, whose agents may still run."""
        self._retries: set[asyncio.Task[None]] = set()
        self._data: dict[Path, tuple[str, str]] = {}
        """For each round, the first host that had its data, and what it found."""

    def connection(self, host: HostSpec) -> SshConnection:
        """Return the connection to a host."""
        return self._connections[host.name]

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables with which the hosts' Python imports the delivered AccelMark."""
        code = self.layout.code
        return {"PYTHONPATH": str(code), PLUGINS_VARIABLE: str(code / PLUGINS)}

    def sandbox(self, node: NodeJob) -> JobSandbox:
        """Return the sandbox of a job."""
        folder, code = find("vendors", self.plan.vendor).path, self.layout.code
        return job_sandbox(self.plan, node.job, code, path_on_host(folder, code))

    def agent(self, node: NodeJob) -> ModuleCommand:
        """Return the agent of a job as a command for its sandbox."""
        layout = self.layout
        return ModuleCommand(
            module=AGENT_MODULE,
            arguments=(str(layout.node_dir(node)),),
            name=node.unique_name(layout.run_id),
            environment=layout.environment(node),
            writable=(Path(layout.work), Path(layout.run)),
            readable=(*node.job.data_dirs.values(), *model_files(node.job)),
        )

    def agent_command(self, node: NodeJob) -> list[str]:
        """Return the command on a host that runs the agent of a job."""
        return self.sandbox(node).sandbox.command(self.python, self.agent(node))

    def preflight_host(self, host: HostSpec) -> SshPreflightHost:
        """Return a host for preflight."""
        return SshPreflightHost(
            spec=host,
            address=host.address,
            python=self.python,
            work_directory=str(self.layout.work),
            variables=self.variables,
            sandbox_command=self.sandbox_command,
            lock_file=str(self.layout.lock(host)),
            hosts=self,
        )

    def sandbox_command(self, node: NodeJob, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark in the sandbox of a job, before its files exist."""
        agent = self.agent(node)
        inside = replace(agent, module=module, arguments=arguments, name=f"{agent.name}-preflight", readable=())
        return self.sandbox(node).sandbox.command(self.python, inside)

    def data_command(self, node: NodeJob) -> list[str] | None:
        """Return the command that fetches and verifies a job's data on a host; None where it needs none."""
        dirs = list(node.job.data_dirs.values())
        if not dirs:
            return None
        in_container = self.plan.cluster.container is not None
        places = [path.parent if in_container or not path.is_dir() else path for path in dirs]
        agent, offline = self.agent(node), ("--offline",) if self.plan.offline else ()
        inside = replace(
            agent,
            module="accelmark.run.controller.data",
            arguments=(str(self.layout.job_file(node)), *offline),
            name=f"{agent.name}-data",
            writable=(Path(self.layout.work), *places),
            readable=(),
        )
        return self.sandbox(node).sandbox.command(self.python, inside)

    async def deliver(self, host: HostSpec) -> None:
        """Deliver AccelMark to a host, once.

        Raises:
            HostError: it could not be delivered.
        """
        async with self._locks[host.name]:
            if (host.name, "code") not in self._present:
                await deliver(self.connection(host), self.python, wheel(), self.layout.code)
                self._present.add((host.name, "code"))

    async def ensure_image(self, node: NodeJob) -> None:
        """Obtain the image of a job on its host, once.

        Raises:
            RunError: it could not be obtained.
        """
        image, host = self.sandbox(node).image, self.connection(node.host)
        if image is None:
            return

        async def run(argv: Sequence[str]) -> tuple[int, str]:
            done = await host.run(argv, timeout_s=_IMAGE_TIMEOUT_S)
            return done.code, (done.out + done.err).decode(errors="replace")

        async with self._locks[host.name]:
            if (host.name, image.name) not in self._present:
                await ensure_image(image, host.name, run, node.node_dir)
                self._present.add((host.name, image.name))

    async def clear(self, node: NodeJob) -> None:
        """End agents of this run on a host, and rename the files of an earlier attempt.

        Raises:
            HostError: the agents do not end.
        """
        host = self.connection(node.host)
        argv = command(self.python, "clear", str(self.layout.run), str(self.layout.node_dir(node)))
        async with self._clearing[host.name]:
            cleared = await host.run(argv, timeout_s=_CLEAR_TIMEOUT_S)
            if cleared.code != 0:
                raise HostError(host.name, f"an earlier attempt cannot be removed: {cleared.message}")
            self._lost.pop(host.name, None)

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run on hosts; returns one message for each host that could not be reached."""
        argv = command(self.python, "clear", str(self.layout.run), "")

        async def end(host: SshConnection) -> str | None:
            try:
                done = await asyncio.wait_for(host.run(argv, timeout_s=None), _CLEAR_TIMEOUT_S)
            except (HostError, TimeoutError) as error:
                return str(error) or f"{host.name}: no answer"
            return None if done.code == 0 else f"{host.name}: {done.message}"

        return [problem for problem in await asyncio.gather(*map(end, map(self.connection, specs))) if problem]

    def end_when_reachable(self, node: NodeJob) -> None:
        """End the agent of a job on a lost host as soon as the host can be reached again."""
        self._lost.setdefault(node.host.name, set()).add(self.layout.node_dir(node))
        retry = asyncio.create_task(self._end_lost(self.connection(node.host)))
        self._retries.add(retry)
        retry.add_done_callback(self._retries.discard)

    async def _end_lost(self, host: SshConnection) -> None:
        while True:
            await asyncio.sleep(LONGEST_PAUSE_S)
            async with self._clearing[host.name]:
                for node_dir in list(self._lost.get(host.name, ())):
                    try:
                        await host.run(command(self.python, "clear", str(node_dir), ""), timeout_s=None)
                    except HostError:
                        break
                    self._lost[host.name].discard(node_dir)
                if not self._lost.get(host.name):
                    self._lost.pop(host.name, None)
                    return

    def save_data_record(self, node: NodeJob, found: str) -> None:
        """Write ``data.json`` of a round from what a host found.

        Raises:
            HostError: another host of the job found other data.
        """
        path = node.node_dir.parent / DATA_FILE
        first, known = self._data.setdefault(path, (node.host.name, found))
        if known != found:
            raise HostError(node.host.name, f"its data differs from that of {first}: {found} here, {known} there")
        if first == node.host.name:
            write_atomic(path, json.dumps(json.loads(found), indent=2))

    async def close(self) -> None:
        """Try once more to end agents on lost hosts, and close all connections."""
        for retry in self._retries:
            retry.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        lost = [self._connections[name].host for name in self._lost]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.end_stale_agents(lost), STOP_TIMEOUT_S)
        await asyncio.gather(*(host.close() for host in self._connections.values()))


@final
@dataclass(frozen=True, kw_only=True)
class SshPreflightHost(PreflightHost):
    """A host over SSH for preflight; it shares the connection of the run."""

    hosts: SshHosts

    @property
    def _connection(self) -> SshConnection:
        return self.hosts.connection(self.spec)

    async def connect(self) -> None:
        """Connect, unless connected."""
        await self._connection.connect()

    async def deliver(self) -> None:
        """Deliver AccelMark, once."""
        await self.hosts.deliver(self.spec)

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end."""
        return await self._connection.run(argv, stdin, timeout_s)

    async def open(self, argv: Sequence[str]) -> HostProcess:
        """Start a command with its standard streams open."""
        return _SshProcess(self._connection, await self._connection.open(argv))


@final
@dataclass(frozen=True, slots=True)
class _SshProcess:
    connection: SshConnection
    process: asyncssh.SSHClientProcess[bytes]

    async def readline(self) -> bytes:
        try:
            return await self.process.stdout.readline()
        except library().Error as error:
            raise self.connection.lost(error) from error

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.write_eof()
        self.process.close()
