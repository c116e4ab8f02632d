"""Run commands on a host: the interface that preflight uses, and its implementation by child processes."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from accelmark.run.agent.task import NodeJob
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError

_END_TIMEOUT_S: Final = 5.0


class SandboxCommand(Protocol):
    """Returns the command that runs a module of AccelMark, with arguments, in the sandbox of a job."""

    def __call__(self, node: NodeJob, module: str, *arguments: str) -> list[str]: ...  # noqa: D102


class HostError(RunError):
    """An operation on a host failed; the message names the host."""

    def __init__(self, host: str, what: str) -> None:
        super().__init__(f"{host}: {what}")
        self.host = host
        self.what = what


class UnreachableError(HostError):
    """A host cannot be reached, or its connection was lost; what runs there may continue."""


@final
@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command on a host."""

    code: int
    out: bytes
    err: bytes

    @property
    def message(self) -> str:
        """The last line of standard error, else of standard output, else the exit code."""
        lines = (self.err.strip() or self.out.strip()).decode(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


class HostProcess(Protocol):
    """A running command on a host with its standard streams open."""

    async def readline(self) -> bytes:
        """Return the next line of standard output; empty at its end."""
        ...

    async def close(self) -> None:
        """Close its standard input, and end it if that does not."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreflightHost(ABC):
    """A host, and where AccelMark's files are on it."""

    spec: HostSpec
    address: str
    """The address at which other hosts reach it."""
    python: str
    work_directory: str
    """The directory below which AccelMark writes."""
    variables: Mapping[str, str]
    """Variables with which its Python imports AccelMark."""
    sandbox_command: SandboxCommand
    lock_file: str | None = None
    """The file that a job locks so that no other run uses the host; None: nothing is locked."""
    visible_file: Path | None = None
    """A file of this machine that the host must see at the same path; None: nothing is shared."""

    async def connect(self) -> None:  # noqa: B027  not all hosts need a connection
        """Connect to it.

        Raises:
            HostError: it cannot be reached, refuses the login, or has an unknown host key.
        """

    async def deliver(self) -> None:  # noqa: B027  not all hosts need a delivery
        """Ensure that AccelMark is on the host.

        Raises:
            HostError: it could not be delivered.
        """

    @abstractmethod
    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end; a non-zero exit code is no error.

        Raises:
            HostError: the command could not be started or did not end in time.
        """

    @abstractmethod
    async def open(self, argv: Sequence[str]) -> HostProcess:
        """Start a command with its standard streams open.

        Raises:
            HostError: it could not be started.
        """


@final
@dataclass(frozen=True, kw_only=True)
class SubprocessHost(PreflightHost):
    """A host whose commands are child processes of this one, behind a prefix such as ``srun``."""

    prefix: tuple[str, ...] = ()
    """Arguments that run a command on the host."""

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end."""
        process = await self._start(argv, asyncio.subprocess.PIPE)
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError as error:
            raise HostError(self.spec.name, f"{argv[0]} did not end within {timeout_s:g} s") from error
        finally:
            await _kill(process)
        return CommandResult(process.returncode or 0, out, err)

    async def open(self, argv: Sequence[str]) -> HostProcess:
        """Start a command with its standard streams open."""
        return _ChildProcess(await self._start(argv, asyncio.subprocess.DEVNULL))

    async def _start(self, argv: Sequence[str], errors: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = [*self.prefix, *argv]
        try:
            return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            raise HostError(self.spec.name, f"{command[0]} cannot be started: {error.strerror}") from error


@final
@dataclass(frozen=True, slots=True)
class _ChildProcess:
    process: asyncio.subprocess.Process

    async def readline(self) -> bytes:
        assert self.process.stdout is not None  # noqa: S101  it was started with a pipe
        return await self.process.stdout.readline()

    async def close(self) -> None:
        assert self.process.stdin is not None  # noqa: S101  it was started with a pipe
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), _END_TIMEOUT_S)
        await _kill(self.process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
