"""The node agent of one job on one host over SSH, and the copy of its directory as it grows, verified by checksums."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.run.host import HostError, UnreachableError
from accelmark.run.launchers.launcher import START_TIMEOUT_S, AgentHandle
from accelmark.run.launchers.ssh.connection import SshConnection, library
from accelmark.run.onhost import command, start_command
from accelmark.run.onhost.files import REFUSED
from accelmark.spec.errors import RequestError
from accelmark.spec.job import NodeExit
from accelmark.spec.number_format import duration

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


@final
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

        Raises:
            UnreachableError: the connection was lost; call again to continue.
            HostError: files cannot be copied intact.
        """
        end, checksums = await self._once()
        for name, digest in checksums.items():
            if self.in_place:
                await wait_until_visible(self.host.name, self.local / name, digest)
            elif await asyncio.to_thread(_sha256, self.local / name) != digest:
                raise HostError(self.host.name, f"the copy of {name} differs from the host's file")
        return end

    def ask(self, *, at_once: bool) -> None:
        """Ask the agent to end, as soon as the host can be reached."""
        self._requests += b"k\n" if at_once else b"s\n"
        self._send(b"k\n" if at_once else b"s\n")

    def _send(self, requests: bytes) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError, BrokenPipeError):
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

        pinging: asyncio.Task[None] | None = None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n" + self._requests)
            pinging = asyncio.create_task(ping())
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
            if pinging is not None:
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
    """Wait until a file that a host wrote in a shared directory is visible here.

    Raises HostError: it does not become visible.
    """
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
    """Called with a message for the user where the connection is lost."""
    _stop_by: float | None = field(default=None, init=False)
    _lost_since: float = field(default=-math.inf, init=False)

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
