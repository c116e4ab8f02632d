"""A host over SSH before anything is started on it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.place import Talk
from accelmark.run.launchers.ssh.connection import Done, SshHost, UnreachableError, library
from accelmark.run.launchers.ssh.layout import Layout
from accelmark.spec.cluster import HostSpec

if TYPE_CHECKING:
    import asyncssh


@final
@dataclass(frozen=True, slots=True)
class SshPlace:
    """A host of a cluster file, through the connection that the run itself uses."""

    connection: SshHost
    layout: Layout
    python: str
    variables: Mapping[str, str]
    bring: Callable[[], Awaitable[None]]
    """Sees to it that AccelMark is there."""
    in_sandbox: Callable[[NodeWork, str, tuple[str, ...]], list[str]]
    shown: Path | None = None

    @property
    def host(self) -> HostSpec:
        """Which host this is."""
        return self.connection.host

    @property
    def address(self) -> str:
        """The address that the cluster file gives it."""
        return self.host.address

    @property
    def work(self) -> str:
        """The work directory."""
        return str(self.layout.work)

    @property
    def lock(self) -> str | None:
        """What a job locks there."""
        return str(self.layout.lock(self.host))

    async def reach(self) -> None:
        """Connect, where that has not been done yet."""
        await self.connection.connect()

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> Done:
        """Run a command there and return what it came to."""
        return await self.connection.run(argv, stdin, timeout_s)

    async def open(self, argv: Sequence[str]) -> Talk:
        """Start a command whose input and output stay open."""
        return _SshTalk(self.host.name, await self.connection.open(argv))

    async def code(self) -> Mapping[str, str]:
        """Deliver AccelMark where it is not there yet, and return the variables that make Python find it."""
        await self.bring()
        return self.variables

    def enclosed(self, work: NodeWork, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module in the job's sandbox."""
        return self.in_sandbox(work, module, arguments)


@final
@dataclass(frozen=True, slots=True)
class _SshTalk:
    name: str
    process: asyncssh.SSHClientProcess[bytes]

    async def readline(self) -> bytes:
        try:
            return await self.process.stdout.readline()
        except library().Error as error:
            raise UnreachableError(self.name, f"the connection was lost ({error})") from error

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.write_eof()
        self.process.close()
