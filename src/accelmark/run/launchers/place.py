"""A host before anything is started on it: commands can be run there, and it is known where files would be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.ssh.connection import Done, HostError
from accelmark.spec.cluster import HostSpec

_GOODBYE_S: Final = 5.0


class Talk(Protocol):
    """A command that goes on while it is talked to."""

    async def readline(self) -> bytes:
        """Return the next line that it prints, empty at its end."""
        ...

    async def close(self) -> None:
        """End its input, which ends it."""
        ...


class Place(Protocol):
    """One host, reached the way that its launcher reaches it."""

    @property
    def host(self) -> HostSpec:
        """Which host this is."""
        ...

    @property
    def address(self) -> str:
        """What the other hosts reach it at."""
        ...

    @property
    def python(self) -> str:
        """Its own Python."""
        ...

    @property
    def work(self) -> str:
        """The directory that AccelMark's files are written below."""
        ...

    @property
    def lock(self) -> str | None:
        """What a job locks so that no other run uses the host; None where nothing is locked."""
        ...

    @property
    def shown(self) -> Path | None:
        """A file of this machine that has to be seen there at the same path; None where nothing is shared."""
        ...

    async def reach(self) -> None:
        """Connect to it.

        Raises:
            HostError: it is out of reach, refuses, or is not who it was.
        """
        ...

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> Done:
        """Run a command there and return what it came to, also where it failed.

        Raises:
            HostError: it could not be run.
        """
        ...

    async def open(self, argv: Sequence[str]) -> Talk:
        """Start a command whose input and output stay open.

        Raises:
            HostError: it could not be run.
        """
        ...

    async def code(self) -> Mapping[str, str]:
        """See to it that AccelMark is there, and return the variables that make its Python find it.

        Raises:
            HostError: it cannot be had there.
        """
        ...

    def enclosed(self, work: NodeWork, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of AccelMark in what the job would run in there."""
        ...


@final
@dataclass(frozen=True, slots=True)
class HerePlace:
    """A host whose commands are started on this machine: itself, or a node behind ``srun``."""

    host: HostSpec
    address: str
    python: str
    work: str
    variables: Mapping[str, str]
    in_sandbox: Callable[[NodeWork, str, tuple[str, ...]], list[str]]
    prefix: tuple[str, ...] = ()
    """What runs a command on the host."""
    shown: Path | None = None
    lock: str | None = None

    async def reach(self) -> None:
        """Do nothing: each command is started anew."""

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> Done:
        """Run a command there and return what it came to."""
        process = await self._start(argv, asyncio.subprocess.PIPE)
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError as error:
            raise HostError(self.host.name, f"{argv[0]} did not end within {timeout_s:g} s") from error
        finally:
            await _bury(process)
        return Done(process.returncode or 0, out, err)

    async def open(self, argv: Sequence[str]) -> Talk:
        """Start a command whose input and output stay open."""
        return _HereTalk(await self._start(argv, asyncio.subprocess.DEVNULL))

    async def _start(self, argv: Sequence[str], errors: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = [*self.prefix, *argv]
        try:
            return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            raise HostError(self.host.name, f"{command[0]} cannot be started: {error.strerror}") from error

    async def code(self) -> Mapping[str, str]:
        """Return the variables that make its Python find this AccelMark, which it sees at the same path."""
        return self.variables

    def enclosed(self, work: NodeWork, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module in the job's sandbox."""
        return self.in_sandbox(work, module, arguments)


@final
@dataclass(frozen=True, slots=True)
class _HereTalk:
    process: asyncio.subprocess.Process

    async def readline(self) -> bytes:
        assert self.process.stdout is not None  # noqa: S101  it was started with a pipe
        return await self.process.stdout.readline()

    async def close(self) -> None:
        assert self.process.stdin is not None  # noqa: S101  it was started with a pipe
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), _GOODBYE_S)
        await _bury(self.process)


async def _bury(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
