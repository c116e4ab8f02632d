"""Run commands on a host: the interface, and its implementation by child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from accelmark.run.agent.rank_exit import advice_for
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError

END_TIMEOUT_S: Final = 30.0


def python_path() -> list[str]:
    """Return the directories of ``PYTHONPATH``, which agents and ranks on this machine inherit."""
    return [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


class HostError(RunError):
    """An operation on a host failed; the message names the host."""

    default_advice: ClassVar[str] = "repeat the operation on that host by hand, and correct what it reports"
    """What to do where an error does not say it, for the table of hosts that are not ready."""

    def __init__(self, host: str, problem: str, advice: str | None = None) -> None:
        self.host = host
        self.problem = problem
        advice = advice or advice_for(problem)
        self.advice = advice or self.default_advice
        self.what = f"{problem}: {advice}" if advice else problem
        """The problem, with the advice of this error if it has one."""
        super().__init__(f"{host}: {self.what}")


class UnreachableError(HostError):
    """A host cannot be reached, or its connection was lost; what runs there may continue."""

    default_advice = (
        "log in to it from this machine by the same address, port, user and key (ssh); correct the cluster file"
    )


class ConnectionLostError(UnreachableError):
    """The connection to a host was lost."""


class CommandResult(NamedTuple):
    """Exit code and output of a command on a host."""

    code: int
    out: bytes
    err: bytes

    @property
    def message(self) -> str:
        """The last line of standard error, else of standard output, else the exit code."""
        lines = (self.err.strip() or self.out.strip()).decode(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self.code}"

    @property
    def output(self) -> str:
        """Standard output, then standard error."""
        return (self.out + self.err).decode(errors="replace")


class Host(ABC):
    """Runs commands, given as argument lists, on one host."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.name = spec.name

    async def connect(self) -> object:  # noqa: B027  not all hosts need a connection
        """Connect, unless connected. Raises HostError: it cannot be reached or refuses, or its host key is unknown."""

    @abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command on this machine that runs ``argv`` on the host."""

    @abstractmethod
    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end; a non-zero exit code is no error.

        Raises HostError: it could not be started or did not end in time; UnreachableError: the host was not reached.
        """

    async def require(
        self, argv: Sequence[str], problem: str, stdin: bytes = b"", timeout_s: float | None = 60.0
    ) -> bytes:
        """Run a command, and return its output. Raises HostError: it failed; ``problem`` and the command's error."""
        done = await self.run(argv, stdin, timeout_s)
        if done.code != 0:
            raise HostError(self.name, f"{problem}: {done.message}")
        return done.out

    @abstractmethod
    def running(
        self, argv: Sequence[str], stdin: bytes, timeout_s: float
    ) -> contextlib.AbstractAsyncContextManager[bytes]:
        """Run a command until the context ends, which closes its input; yields the first line of its output.

        Raises HostError: it could not be started, or ended without output; TimeoutError: it printed nothing in time.
        """


class SubprocessHost(Host):
    """A host whose commands are child processes of this one; ``prefix`` has the arguments before each (``srun``)."""

    def __init__(self, spec: HostSpec, prefix: Callable[[HostSpec], Sequence[str]] = lambda _: ()) -> None:
        super().__init__(spec)
        self._prefix = prefix

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command with its prefix."""
        return [*self._prefix(self.spec), *argv]

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end."""
        async with self._started(argv) as process:
            try:
                out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
            except TimeoutError as error:
                raise HostError(self.name, f"{argv[0]} did not end within {timeout_s:g} s") from error
            return CommandResult(process.returncode or 0, out, err)

    @contextlib.asynccontextmanager
    async def running(self, argv: Sequence[str], stdin: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """Run a command until the context ends."""
        async with self._started(argv) as process:
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018  started with pipes
            process.stdin.write(stdin)
            try:
                line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
                if not line:
                    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
                    raise HostError(self.name, CommandResult(process.returncode or 0, out, err).message)
                yield line
            finally:
                process.stdin.close()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), END_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _started(self, argv: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
        command, pipe = self.command(argv), asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            is_absent = isinstance(error, FileNotFoundError)
            what = "is not on the PATH" if is_absent else f"cannot be started: {error.strerror}"
            raise HostError(self.name, f"{command[0]} {what}") from error
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
