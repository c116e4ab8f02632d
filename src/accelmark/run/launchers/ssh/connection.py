"""An SSH connection to one host: host keys are checked, and commands are argument lists, quoted in one place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from accelmark.run.host import END_TIMEOUT_S, CommandResult, ConnectionLostError, Host, HostError, UnreachableError
from accelmark.run.launchers.ssh.options import KEEPALIVES, Options
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.plugins.requirements import pip_install

if TYPE_CHECKING:
    import asyncssh

_CONNECT_TIMEOUT_S: Final = 20.0


@final
class SshConnection(Host):
    """Runs commands on one host; connects on first use, and again after the connection was lost."""

    def __init__(self, spec: HostSpec, options: Options, dialling: asyncio.Semaphore | None = None) -> None:
        """``dialling`` limits how many logins happen at the same time."""
        super().__init__(spec)
        self._options = options
        self._dialling = dialling or asyncio.Semaphore()
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> asyncssh.SSHClientConnection:
        """Return the open connection, or a new one.

        Raises HostError: its host key is unknown, or has changed: trying again does not help; UnreachableError: the
        host refuses the login or does not answer, or a file of this machine that SSH needs is missing or invalid.
        """
        async with self._connecting:
            if self._connection is None or self._connection.is_closed():
                async with self._dialling:
                    self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> asyncssh.SSHClientConnection:
        ssh, settings = library(), self._options
        timeout_s = min(_CONNECT_TIMEOUT_S, settings.reconnect_s)
        options = {
            "client_keys": (key := settings.key_of(self.spec)) and [str(key)],
            "known_hosts": settings.known_hosts and str(settings.known_hosts),
            "username": settings.user_of(self.spec),
            "config": settings.ssh_config and [str(settings.ssh_config)],
        }
        try:
            return await ssh.connect(  # type: ignore[no-any-return]
                self.spec.address,
                self._port(),
                connect_timeout=timeout_s,
                login_timeout=_CONNECT_TIMEOUT_S,
                keepalive_interval=settings.ping_s,
                keepalive_count_max=KEEPALIVES,
                **{name: value for name, value in options.items() if value is not None},
            )
        except ssh.HostKeyNotVerifiable as error:
            raise self._wrong_key(error.reason) from error
        except TimeoutError as error:
            raise self._unreachable(f"no answer within {timeout_s:g} s") from error
        except (OSError, ValueError, ssh.Error) as error:  # ValueError: a key or a file that SSH reads
            why = str(error).removesuffix(f" on host {self.spec.address}")
            if isinstance(error, OSError) and (error.errno or 0) > 0:  # negative where a name cannot be resolved
                why = os.strerror(error.errno or 0) + (f": {error.filename}" if error.filename else "")
            raise self._unreachable(why) from error

    def _unreachable(self, why: str) -> UnreachableError:
        """Return the error of a host that cannot be reached, with the files that the cluster file names.

        Without a label, the address is the host's name: then the text is the same for all hosts, to be grouped.
        """
        host, settings = self.spec, self._options
        at = f"{host.address} port {settings.port_of(host)}" if host.label else f"port {settings.port_of(host)}"
        at = at if settings.ssh_config is None else host.address
        files = {"key": settings.key_of(host), "known_hosts": settings.known_hosts}
        used = ", ".join(f"{name} {file}" for name, file in files.items() if file is not None)
        return UnreachableError(self.name, f"cannot be reached at {at}: {why}" + (f" ({used})" if used else ""))

    def _wrong_key(self, reason: str) -> HostError:
        """Return whether a host key is unknown or has changed; the texts are the same for all hosts, to be grouped."""
        address, port = self.spec.address, self._options.port_of(self.spec)
        known = (self._options.known_hosts or Path("~/.ssh/known_hosts")).expanduser()
        scan = f"ssh-keyscan -p {port} ADDRESS"
        with contextlib.suppress(OSError, ValueError):
            if library().match_known_hosts(str(known), address, "", port)[0]:
                problem = f"its host key has changed: it is not the one in {known}, and nothing is sent to the host"
                advice = f"find out why; if it was reinstalled, replace its line there ({scan})"
                return HostError(self.name, problem, advice)
        problem = f"unknown host key ({reason.removesuffix(f' for host {address}')})"
        return HostError(self.name, problem, f"verify the key, then add it: {scan} >> {known}")

    def _port(self) -> int | tuple[()]:
        """Return the port; an empty tuple leaves it to the configuration file that was given."""
        settings = self._options
        is_default = self.spec.port is None and "ssh_port" not in settings.model_fields_set
        return () if settings.ssh_config is not None and is_default else settings.port_of(self.spec)

    async def run(self, argv: Sequence[str], stdin: bytes = b"", timeout_s: float | None = 60.0) -> CommandResult:
        """Run a command to its end."""
        asyncssh, connection = library(), await self.connect()
        try:
            # Empty input would leave the command's standard input open.
            source: dict[str, Any] = {"input": stdin} if stdin else {"stdin": asyncssh.DEVNULL}
            done = await connection.run(shlex.join(argv), encoding=None, check=False, timeout=timeout_s, **source)
        except asyncssh.TimeoutError as error:
            raise HostError(self.name, f"{argv[0]} did not end within {timeout_s:g} s") from error
        except (OSError, asyncssh.Error) as error:
            raise self.lost(error) from error
        if done.exit_status is None:
            self._drop()
            raise self.lost()
        return CommandResult(done.exit_status, _bytes(done.stdout), _bytes(done.stderr))

    async def open(self, argv: Sequence[str]) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command with its standard streams open; raises UnreachableError if the host cannot be reached."""
        asyncssh, connection = library(), await self.connect()
        try:
            return await connection.create_process(shlex.join(argv), encoding=None)
        except (OSError, asyncssh.Error) as error:
            self._drop()
            raise self.lost(error) from error

    def lost(self, error: Exception | None = None) -> ConnectionLostError:
        """Return the error for a connection that was lost."""
        return ConnectionLostError(self.name, "the connection was lost" + (f" ({error})" if error else ""))

    @contextlib.asynccontextmanager
    async def running(self, argv: Sequence[str], stdin: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """Run a command until the context ends."""
        process = await self.open(argv)
        try:
            try:
                process.stdin.write(stdin)
                line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
                if not line:
                    done = await asyncio.wait_for(process.wait(), timeout_s)
                    raise HostError(self.name, CommandResult(done.exit_status or 0, b"", _bytes(done.stderr)).message)
            except library().Error as error:
                raise self.lost(error) from error
            yield line
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                process.stdin.write_eof()
                await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
            process.close()

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command of OpenSSH's client that does the same as :meth:`run`."""
        settings = self._options
        key, known, user = settings.key_of(self.spec), settings.known_hosts, settings.user_of(self.spec)
        options = ["-F", str(settings.ssh_config)] if settings.ssh_config is not None else []
        options += ["-p", str(port)] if isinstance(port := self._port(), int) else []
        options += ["-i", str(key)] if key is not None else []
        options += ["-o", f"UserKnownHostsFile={known}"] if known is not None else []
        return ["ssh", *options, f"{user}@{self.spec.address}" if user else self.spec.address, shlex.join(argv)]

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def close(self) -> None:
        """Close the connection; detached processes continue."""
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._connection.wait_closed(), 2)
            self._connection = None


def library() -> Any:
    """Return asyncssh; raises RequestError if it is not installed."""
    install = pip_install(["accelmark[cluster]"])
    with raising(RequestError, f"launching over SSH needs asyncssh: run {install}", ImportError):
        import asyncssh
    return asyncssh


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""
