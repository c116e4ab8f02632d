"""One host over SSH: one connection, host keys checked, every command an argument list that is quoted once, here."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from accelmark.run.launchers.ssh.refusal import CONNECT_TIMEOUT_S, key_of, why_not_reached
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import RequestError, RunError

if TYPE_CHECKING:
    import asyncssh

_KEEPALIVE_S: Final = 5.0
_KEEPALIVES: Final = 3


class HostError(RunError):
    """A host did not do what it was asked; the message names it."""

    def __init__(self, host: str, what: str) -> None:
        super().__init__(f"{host}: {what}")
        self.host = host
        self.what = what


class UnreachableError(HostError):
    """A host cannot be reached, or its connection was lost: what ran there may well go on."""


@final
@dataclass(frozen=True, slots=True)
class Done:
    """What a command on a host came to."""

    code: int
    out: bytes
    err: bytes

    @property
    def said(self) -> str:
        """The last line of its errors, else of its output, for people."""
        lines = (self.err.strip() or self.out.strip()).decode(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


@final
class SshHost:
    """Runs commands on one host; connects when first needed, and again where the connection was lost."""

    def __init__(self, host: HostSpec, cluster: ClusterSpec) -> None:
        self.host = host
        self._cluster = cluster
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()

    @property
    def name(self) -> str:
        """The host's name for people."""
        return self.host.name

    async def connect(self) -> asyncssh.SSHClientConnection:
        """Return the living connection, made anew where there is none.

        Raises:
            UnreachableError: the host refuses, does not answer, or is not who it was; or a file of this machine that
                SSH needs (key, known hosts, configuration) is not there or wrong.
        """
        async with self._connecting:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> asyncssh.SSHClientConnection:
        ssh = library()
        options: dict[str, Any] = {}
        key = key_of(self.host, self._cluster)
        if key is not None:
            options["client_keys"] = [str(key)]
        if self._cluster.known_hosts is not None:
            options["known_hosts"] = str(self._cluster.known_hosts.expanduser())
        user = self.host.user or self._cluster.user
        if user is not None:
            options["username"] = user
        try:
            return await ssh.connect(  # type: ignore[no-any-return]
                self.host.address,
                self._cluster.port_of(self.host),
                connect_timeout=min(CONNECT_TIMEOUT_S, self._cluster.reconnect_s),
                login_timeout=CONNECT_TIMEOUT_S,
                keepalive_interval=min(_KEEPALIVE_S, self._cluster.reconnect_s / _KEEPALIVES),
                keepalive_count_max=_KEEPALIVES,
                **options,
            )
        except (TimeoutError, OSError, ValueError, ssh.Error) as error:  # ValueError: a key or a file that SSH reads
            raise UnreachableError(self.name, why_not_reached(error, self.host, self._cluster)) from error

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> Done:
        """Run a command and return what it came to, also where it failed.

        Raises:
            UnreachableError: the host is out of reach, or was lost before the command's end was seen.
        """
        asyncssh = library()
        connection = await self.connect()
        try:
            done = await connection.run(shlex.join(argv), input=stdin, encoding=None, check=False, timeout=timeout_s)
        except (OSError, asyncssh.Error) as error:
            if isinstance(error, asyncssh.TimeoutError):
                raise HostError(self.name, f"{argv[0]} did not end within {timeout_s:g} s") from error
            raise UnreachableError(self.name, f"the connection was lost ({error})") from error
        if done.exit_status is None:
            self.drop()
            raise UnreachableError(self.name, "the connection was lost")
        return Done(done.exit_status, _bytes(done.stdout), _bytes(done.stderr))

    async def open(self, argv: Sequence[str]) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command whose input and output stay open.

        Raises:
            UnreachableError: the host is out of reach.
        """
        asyncssh = library()
        connection = await self.connect()
        try:
            return await connection.create_process(shlex.join(argv), encoding=None)
        except (OSError, asyncssh.Error) as error:
            self.drop()
            raise UnreachableError(self.name, f"the connection was lost ({error})") from error

    def as_openssh(self, argv: Sequence[str]) -> list[str]:
        """Return the command of openssh's client that does what :meth:`run` does."""
        key, known, user = key_of(self.host, self._cluster), self._cluster.known_hosts, self.host.user
        user = user or self._cluster.user
        options = ["-p", str(self._cluster.port_of(self.host))]
        options += ["-i", str(key)] if key is not None else []
        options += ["-o", f"UserKnownHostsFile={known.expanduser()}"] if known is not None else []
        return ["ssh", *options, f"{user}@{self.host.address}" if user else self.host.address, shlex.join(argv)]

    def drop(self) -> None:
        """Forget the connection; the next command makes another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def close(self) -> None:
        """Close the connection; what was started detached goes on."""
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._connection.wait_closed(), 2)
            self._connection = None


def library() -> Any:
    """Return asyncssh.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import asyncssh
    except ImportError as error:
        raise RequestError("launching over SSH needs asyncssh: pip install 'accelmark[cluster]'") from error
    return asyncssh


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""
