"""Launch node agents over SSH: AccelMark is delivered to hosts, and agents outlive connections.

The directory of a job on a host is copied as it grows, and verified by checksums.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal

from accelmark.datasets.ensure import CACHE_VARIABLE, cache_directory
from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.run.agent.agent import agent_commands, temporary_directories
from accelmark.run.agent.task import TASK_FILE, AgentTask, NodeJob
from accelmark.run.host import HostError, UnreachableError
from accelmark.run.launchers.launcher import START_TIMEOUT_S, AgentHandle, Launcher
from accelmark.run.launchers.ssh import connection
from accelmark.run.launchers.ssh.connection import SshConnection, library
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.onhost import command, start_command
from accelmark.run.onhost.program import REFUSED
from accelmark.run.processes import NODE_MARKER, RUN_MARKER, ProcessId
from accelmark.run.sandboxes.sandbox import ensure_image
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.job import JobSpec, NodeExit
from accelmark.spec.log.records import DATA_FILE
from accelmark.spec.number_format import duration
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from accelmark.spec.plugins.launcher import options_of

if TYPE_CHECKING:
    import asyncssh

AgentEnd = Literal["exit", "dead", "never"]
_NAME: Final = re.compile(r"[^/.\x00-\x1f][^/\x00-\x1f]{0,250}(/[^/.\x00-\x1f][^/\x00-\x1f]{0,250})*")
"""A relative path without hidden components and without ``..``."""
LEFT_FILE: Final = "left_on_host.json"
"""Lists files of ranks that are too large to be copied."""
_LARGEST_FRAME: Final = 1 << 20
_GROWING: Final = (".log", ".jsonl")
_SETTLE_S: Final = 20.0
"""Longest time until a file that a host wrote to a shared file system is visible here."""


@dataclass(slots=True)
class NodeStream:
    """Copies one node directory of one host to this machine."""

    host: SshConnection
    python: str
    remote: str
    owner: str
    """Names this machine and the run's directory, as ``onhost`` requires."""
    local: Path
    ping_s: float
    """Interval of heartbeats."""
    poll_s: float = 0.3
    """Interval between the host's checks for new bytes."""
    skip: Sequence[str] = ()
    """Subdirectories that are not copied: the agent's own."""
    in_place: bool = False
    """Whether ``local`` and ``remote`` are the same directory on a shared file system: nothing is copied then."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the host last answered a heartbeat, by ``time.monotonic``."""
    _process: asyncssh.SSHClientProcess[bytes] | None = None
    _requests: bytes = b""

    async def follow(self) -> AgentEnd:
        """Copy files until the agent has ended; returns how it ended, once every file is identical here.

        Raises UnreachableError: the connection was lost (call again to continue); HostError: files cannot be copied.
        """
        for _ in range(2):  # a copy that the machine damaged while it went down is made again
            end, checksums = await self._once()
            if self.in_place:
                for name, digest in checksums.items():
                    await wait_until_visible(self.host.name, self.local / name, digest)
                return end
            copies = {name: await asyncio.to_thread(_sha256, self.local / name) for name in checksums}
            damaged = sorted(name for name, digest in checksums.items() if copies[name] != digest)
            if not damaged:
                return end
            for name in damaged:
                (self.local / name).unlink(missing_ok=True)
        raise HostError(self.host.name, f"copies of {', '.join(damaged)} differ from the host's files")

    def ask(self, *, at_once: bool) -> None:
        """Ask the agent to end, as soon as the host can be reached."""
        self._requests += b"k\n" if at_once else b"s\n"
        self._send(b"k\n" if at_once else b"s\n")

    def _send(self, requests: bytes) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(requests)

    async def _once(self) -> tuple[AgentEnd, dict[str, str]]:
        make_directory(self.local)
        process = await self.host.open(command(self.python, "follow", self.remote, self.owner))
        self._process = process
        known = [] if self.in_place else [path for path in self.local.iterdir() if path.name.endswith(_GROWING)]
        request = {
            "have": {path.name: path.stat().st_size for path in known if path.is_file()},
            "start_timeout_s": START_TIMEOUT_S,
            "poll_s": self.poll_s,
            "send": not self.in_place,
            "skip": list(self.skip),
        }

        async def ping() -> None:
            while True:
                await asyncio.sleep(self.ping_s)
                self._send(b"p\n")

        pinging = asyncio.create_task(ping())
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n" + self._requests)
            while True:
                line = await process.stdout.readline()
                if not line.endswith(b"\n"):
                    errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                    if errors:
                        raise HostError(self.host.name, f"its files cannot be copied: {errors[-1]}")
                    raise self.host.lost()
                header: dict[str, Any] = json.loads(line)
                if "heard" in header:
                    self.heard_at = time.monotonic()
                    continue
                if "end" in header:
                    if left := header["left"]:
                        listed = {"host": self.host.name, "directory": self.remote, "bytes": left}
                        write_atomic(self.local / LEFT_FILE, json.dumps(listed, indent=2))
                    return header["end"], header["sha256"]
                await self._take(process, header)
        except (OSError, library().Error, asyncio.IncompleteReadError) as error:
            raise self.host.lost(error) from error
        finally:
            pinging.cancel()
            self._process = None
            process.close()

    async def _take(self, process: asyncssh.SSHClientProcess[bytes], header: dict[str, Any]) -> None:
        name, offset, size = str(header["file"]), int(header["offset"]), int(header["size"])
        if not _NAME.fullmatch(name) or not 0 <= size <= _LARGEST_FRAME:
            raise HostError(self.host.name, f"sent an invalid frame: {name!r} of {size} bytes")
        content = await process.stdout.readexactly(size) if size else b""
        path = self.local / name
        with write_errors(path):
            if offset == 0:
                make_directory(path.parent)
                if size < _LARGEST_FRAME and not name.endswith(_GROWING):
                    partial = path.with_name(f".{path.name}.part")
                    partial.write_bytes(content)
                    partial.replace(path)
                    return
            # Thousands of ranks append a line each second: one call opens the file, without buffers.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(descriptor).st_size != offset:
                    os.ftruncate(descriptor, offset)
                written = 0
                while written < size:
                    written += os.pwrite(descriptor, content[written:], offset + written)
            finally:
                os.close(descriptor)


async def wait_until_visible(host: str, path: Path, digest: str) -> None:
    """Wait until a file that a host wrote in a shared directory is visible here. Raises HostError: it is not."""
    deadline = time.monotonic() + _SETTLE_S
    while await asyncio.to_thread(_sha256, path) != digest:
        if time.monotonic() > deadline:
            problem = f"{path}, which it wrote, is not visible here: shared_directory is not shared with this machine"
            raise HostError(host, f"{problem}; correct or remove it in the cluster file")
        await asyncio.sleep(0.2)


def _sha256(path: Path) -> str | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return None


STOP_TIMEOUT_S: Final = 30.0
"""Longest time to reconnect to a host once the run is to end."""
LONGEST_PAUSE_S: Final = 5.0


class _SshAgent(AgentHandle):
    launcher: _SshLauncher
    host: SshConnection

    def __init__(self, launcher: _SshLauncher, node: NodeJob) -> None:
        directory = launcher.remote_run.joinpath(*node.node_dir.parts[-3:])
        markers = {RUN_MARKER: launcher.run_id, NODE_MARKER: str(directory), CACHE_VARIABLE: str(cache_directory())}
        writable = (Path(launcher.work_directory), Path(launcher.remote_run))
        super().__init__(launcher, node, directory, {**launcher.variables, **markers}, writable)
        self._job_file = directory.parent / ("job.hosts.json" if launcher.is_shared_run else "job.json")
        """The job with the hosts' paths; where the run is shared, it is next to ``job.json``."""
        copied = (self.host, launcher.python, str(directory), launcher.owner, node.node_dir)
        poll_s = max(_POLL_S, len(launcher.plan.cluster.hosts) / POLLS_PER_S)
        skip, in_place = temporary_directories(node.job.framework), launcher.is_shared_run
        self._stream = NodeStream(*copied, launcher.options.ping_s, poll_s, skip, in_place)
        self._stop_by: float | None = None
        self._lost_since = -math.inf

    def commands(self) -> list[list[str]]:
        python, data = self.launcher.python, self._data_command()
        commands = [
            connection.delivery_command(python, self.launcher.code),
            *self.sandbox.image_commands(),
            self.launcher.clear_command(str(self.directory)),
            command(python, "files"),
            *([data] if data is not None else []),
            start_command(str(self.directory), self.command),
            command(python, "follow", str(self.directory), self.launcher.owner),
        ]
        started = agent_commands(self._task(), self.node.job, Path(self.directory), self.launcher.rank_python)
        return [*map(self.host.command, commands), *started]

    def _job(self) -> JobSpec:
        job, code = self.node.job, self.launcher.code
        adapted = job.adaptation
        if adapted is not None:
            adapted = adapted.model_copy(update={"path": self.launcher.path_on_host(adapted.path)})
        # An evaluation job reads the checkpoints of its round, which is next to it.
        checkpoints = os.path.relpath(job.checkpoint_dir, self.node.node_dir.parent)
        return job.model_copy(
            update={
                "case": connection.on_host(job.case, code),
                "extern": connection.on_host(job.extern, code) if job.extern is not None else None,
                "adaptation": adapted,
                "checkpoint_dir": Path(self.directory.parent / checkpoints),
            }
        )

    def _task(self) -> AgentTask:
        task, path_on_host = self.node.task, self.launcher.path_on_host
        changed: dict[str, object] = {
            "run": self.launcher.run_id,
            "job_file": Path(self._job_file),
            "limits": task.limits.model_copy(update={"abandon_s": self.launcher.options.abandon_s}),
            "locks_host": True,
            "requirements": task.requirements and path_on_host(task.requirements),
        }
        if task.telemetry is not None:
            folder = path_on_host(task.telemetry.vendor_folder)
            changed["telemetry"] = task.telemetry.model_copy(update={"vendor_folder": folder})
        return task.model_copy(update=changed)

    def _data_command(self) -> list[str] | None:
        """Return the command that fetches and verifies the job's data on the host; None where it needs none."""
        plan, dirs = self.launcher.plan, list(self.node.job.data_dirs.values())
        if not dirs:
            return None
        places = [path.parent if plan.cluster.container is not None or not path.is_dir() else path for path in dirs]
        inside = self.module._replace(
            module="accelmark.run.controller.data",
            arguments=(str(self._job_file), *(("--offline",) if plan.offline else ())),
            name=f"{self.module.name}-data",
            writable=(Path(self.launcher.work_directory), *places),
            readable=(),
        )
        return self.sandbox.command(self.launcher.python, inside)

    async def prepare(self) -> None:
        """Remove an earlier attempt; deliver AccelMark, the image, the agent's files and the job's data."""
        launcher, host = self.launcher, self.host
        async with launcher.locks[host.name]:
            argv = launcher.clear_command(str(self.directory))
            await host.require(argv, "an earlier attempt cannot be removed", timeout_s=_CLEAR_TIMEOUT_S)
            launcher.lost = {lost for lost in launcher.lost if lost[0] != host.name}
        await launcher.deliver(self.node.host)
        async with launcher.locks[host.name]:
            image = self.sandbox.image
            if image is not None and (host.name, image.name) not in launcher.present:
                await ensure_image(image, host, self.node.node_dir)
                launcher.present.add((host.name, image.name))
        task, job = self._task().model_dump_json(indent=2), self._job().model_dump_json(indent=2)
        await connection.put_files(host, launcher.python, {self._job_file: job, self.directory / TASK_FILE: task})
        if launcher.is_shared_run:
            written = hashlib.sha256(task.encode()).hexdigest()
            await wait_until_visible(host.name, self.node.node_dir / TASK_FILE, written)
        await self._fetch_data()

    async def _fetch_data(self) -> None:
        argv, host = self._data_command(), self.host
        if argv is None:
            return
        if self.launcher.plan.cluster.container is not None:
            places = (str(path.parent) for path in self.node.job.data_dirs.values())
            await host.run(["mkdir", "-p", "--", *places])
        output = await host.require(argv, "its data is not available", timeout_s=4 * 3600.0)
        records = json.loads(output.decode(errors="replace").strip().splitlines()[-1])
        path = self.node.node_dir.parent / DATA_FILE
        content = json.dumps({name: {**record, "sample": {}} for name, record in records.items()})  # each draws its own
        first, known = self.launcher.data.setdefault(path, (host.name, content))
        if known != content:
            raise HostError(host.name, f"its data differs from the data of {first}: {content} here, {known} there")
        if first == host.name:
            write_atomic(path, json.dumps(records, indent=2))

    async def start(self) -> None:
        """Start the agent so that it outlives the connection; a second call starts no second agent."""
        argv = start_command(str(self.directory), self.command)
        await self.host.require(argv, "the node agent could not be started")

    async def attach(self) -> bool:
        """Return whether an agent was ever started; True where that cannot be read: :meth:`wait` retries.

        Raises RequestError: another coordinator follows it, for which this run's directory is a copy.
        """
        try:
            argv = command(self.launcher.python, "started", str(self.directory), self.launcher.owner)
            done = await self.host.run(argv)
        except HostError:
            return True
        if done.code == REFUSED:
            raise RequestError(f"{self.host.name}: {done.message}")
        return done.code == 0

    async def stop(self, *, at_once: bool) -> None:
        self._stop_by = time.monotonic() + STOP_TIMEOUT_S * (0.3 if at_once else 1)
        self._stream.ask(at_once=at_once)

    async def wait(self) -> NodeExit:
        pause_s = 0.2
        while True:
            try:
                end = await self._stream.follow()
                if end == "never":
                    return self.record("lost", "its node agent was never started")
                return await self.ended(has_exit=end == "exit")
            except UnreachableError as error:
                now = time.monotonic()
                if self._stream.heard_at >= self._lost_since:
                    self._lost_since, pause_s = now, 0.2  # it was reachable since the last outage: this is another one
                    again = f"trying again for {duration(self.launcher.reconnect_s)}, its ranks may continue"
                    self.launcher.report(f"{self.host.name}: {error.what}; {again}")
                is_over = self._stop_by is not None and now > self._stop_by
                if is_over or now - self._lost_since > self.launcher.reconnect_s:
                    self.launcher.end_when_reachable(self)
                    why = f"unreachable for {now - self._lost_since:.0f} s: {error.what}"
                    return self.record("lost", f"{why}; processes still running there are ended once it can be reached")
            except HostError as error:
                self.launcher.end_when_reachable(self)
                return self.record("lost", error.what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def end_processes(self) -> int:
        """End a dead agent's processes, and copy its last files."""
        num_ended = await super().end_processes()
        await self._stream.follow()
        return num_ended


LOGINS_AT_ONCE: Final = 64
"""Logins take CPU time here (key exchange): with many more at once, each would exceed its time limit."""
_POLL_S: Final = 0.3
POLLS_PER_S: Final = 512
"""Interval at which each host sends new bytes of files, and the most that all hosts together send in a second."""
_CLEAR_TIMEOUT_S: Final = 90.0


class _SshLauncher(Launcher):
    """Starts agents on the hosts of a cluster file."""

    locks_hosts = True

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self.options = options_of(Options, plan.cluster)
        self.reconnect_s = self.options.reconnect_s
        self.shared_directory = shared = self.options.shared_directory
        self._work = PurePosixPath(self.options.work_directory if shared is None else shared / "accelmark")
        self.work_directory = str(self._work)
        self.run_id = plan.run_id or self.run_id
        here = ProcessId.own()
        self.owner = f"{here.boot_id} {here.hostname}:{run.absolute()}"
        """Names this machine and the run's directory: a copy has another owner."""
        self.is_shared_run = shared is not None and run.absolute().is_relative_to(shared)
        """Whether the hosts write to the run's directory directly, so that nothing is copied."""
        self.remote_run = PurePosixPath(run.absolute()) if self.is_shared_run else self._work / "runs" / self.run_id
        """The directory of the run on its hosts."""
        hosts, dialling = plan.cluster.hosts, asyncio.Semaphore(LOGINS_AT_ONCE)
        self._connections = {host.name: SshConnection(host, self.options, dialling) for host in hosts}
        raise_descriptor_limit(len(hosts))
        self.locks = {name: asyncio.Lock() for name in self._connections}
        self.present: set[tuple[str, str]] = set()
        """Hosts, and the code or image that is known to be on them."""
        self.lost: set[tuple[str, PurePosixPath]] = set()
        """Lost hosts, and directories there of jobs whose agents may still run."""
        self._retries: set[asyncio.Task[None]] = set()
        self.data: dict[Path, tuple[str, str]] = {}
        """For each round, the first host that had its data, and its content."""

    @property
    def code(self) -> PurePosixPath:
        return self._work / "code" / connection.wheel().directory

    @property
    def variables(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(self.code), PLUGINS_VARIABLE: str(self.code / connection.PLUGINS)}

    def host(self, spec: HostSpec) -> SshConnection:
        return self._connections[spec.name]

    def path_on_host(self, path: Path) -> Path:
        return connection.path_on_host(path, self.code)

    def agents(self, nodes: Sequence[NodeJob]) -> Sequence[_SshAgent]:
        return [_SshAgent(self, node) for node in nodes]

    def clear_command(self, node_dir: str) -> list[str]:
        """Return the command that ends agents of this run, renames an earlier attempt, and removes old runs."""
        keep_days = "" if self.is_shared_run else f"{self.options.keep_days:g}"
        return command(self.python, "clear", str(self.remote_run), node_dir, keep_days, self.owner)

    async def deliver(self, host: HostSpec) -> None:
        async with self.locks[host.name]:
            if (host.name, "code") not in self.present:
                await connection.deliver(self.host(host), self.python, self.code)
                self.present.add((host.name, "code"))

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run on hosts; unreachable ones end by themselves without heartbeats."""
        left = duration(self.options.abandon_s)

        async def end(spec: HostSpec) -> str:
            try:
                running = self.host(spec).run(self.clear_command(""), timeout_s=None)
                done = await asyncio.wait_for(running, _CLEAR_TIMEOUT_S)
                problem = "" if done.code == 0 else f"{spec.name}: {done.message}"
            except (HostError, TimeoutError) as error:
                problem = str(error) or f"{spec.name}: no answer"
            return problem and f"{problem}; agents there end by themselves after {left} without a coordinator"

        return [problem for problem in await asyncio.gather(*map(end, specs)) if problem]

    def end_when_reachable(self, agent: _SshAgent) -> None:
        """End the agent of a job on a lost host as soon as the host can be reached again."""
        host, lost = agent.host, (agent.host.name, agent.directory)
        argv = command(self.python, "clear", str(lost[1]), "", "", self.owner)

        async def end() -> None:
            while lost in self.lost:
                await asyncio.sleep(LONGEST_PAUSE_S)
                async with self.locks[host.name]:
                    if lost in self.lost:
                        with contextlib.suppress(HostError):
                            await host.run(argv, timeout_s=None)
                            self.lost.discard(lost)

        self.lost.add(lost)
        self._retries.add(asyncio.create_task(end()))

    async def close(self) -> None:
        """Try once more to end agents on lost hosts, and close all connections."""
        for retry in self._retries:
            retry.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        lost = [self._connections[name].spec for name in {name for name, _ in self.lost}]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.end_stale_agents(lost), STOP_TIMEOUT_S)
        await asyncio.gather(*(host.close() for host in self._connections.values()))


def raise_descriptor_limit(num_hosts: int) -> None:
    """Raise this process's limit of open files to connect to all hosts. Raises RequestError: it may not be raised."""
    needed = 256 + 2 * num_hosts  # twice as many connections as hosts, and other files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        problem = f"{num_hosts} hosts need {needed} open files, this machine allows {hard}"
        raise RequestError(f"{problem}: raise the hard limit (ulimit -Hn {needed}, or nofile in limits.conf)")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


create = _SshLauncher
