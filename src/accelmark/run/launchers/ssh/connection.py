"""SSH connections to hosts, and the delivery of files and of the running AccelMark itself, as a wheel.

Host keys are checked, and commands are argument lists, quoted in one place.

The wheel is reproducible, so its hash names it, and it is sent once to each host. Cases, vendors and frameworks from
plug-ins are in it below ``plugins/``. A program on the host (:mod:`accelmark.run.onhost.program`) writes files, since
SFTP reports a full disk or a read-only file system as "Failure" only, and some hosts have no SFTP server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import os
import shlex
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import accelmark
from accelmark.run.host import END_TIMEOUT_S, CommandResult, ConnectionLostError, Host, HostError, UnreachableError
from accelmark.run.launchers.ssh.options import KEEPALIVES, Options
from accelmark.run.onhost import command
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.plugins.catalog import JOB_KINDS, FolderRef, extensions, folders
from accelmark.spec.plugins.requirements import pip_install

if TYPE_CHECKING:
    import asyncssh

_CONNECT_TIMEOUT_S: Final = 20.0


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


PLUGINS: Final = "plugins"
_SKIPPED: Final = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache"}


class Wheel(NamedTuple):
    """A wheel's bytes, their hash, and the name of the directory for its content."""

    content: bytes
    sha256: str
    directory: str


@cache
def wheel() -> Wheel:
    """Build the wheel."""
    root = Path(accelmark.__file__).parent
    members = {f"accelmark/{name}": path for name, path in _tree(root)}
    for place, folder in _plugins(root):
        members |= {f"{place}/{name}": path for name, path in _tree(folder)}
    info = f"accelmark-{accelmark.__version__}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: accelmark\nVersion: {accelmark.__version__}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: accelmark\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = {name: path.read_bytes() for name, path in members.items()}
    contents |= {name: text.encode() for name, text in texts.items()}
    record = ""
    for name, content in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Wheel(buffer.getvalue(), sha256, f"accelmark-{accelmark.__version__}-{sha256[:16]}")


def on_host(ref: FolderRef, code: PurePosixPath) -> FolderRef:
    """Return a plug-in's folder, or one inside it, with its path in the wheel unpacked at ``code``."""
    is_ours = ref.path.is_relative_to(Path(accelmark.__file__).parent)
    changed = {"path": path_on_host(ref.path, code)} | ({} if is_ours else {"package": None})
    return ref.model_copy(update=changed)


def path_on_host(path: Path, code: PurePosixPath) -> Path:
    """Return the path of a plug-in's folder, or of a file inside it, in the wheel unpacked at ``code``."""
    root = Path(accelmark.__file__).parent
    if path.is_relative_to(root):
        return Path(code / "accelmark" / path.relative_to(root))
    for place, folder in _plugins(root):
        if path.is_relative_to(folder):
            return Path(code / place / path.relative_to(folder))
    return path


def _plugins(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path in the wheel, and on this machine, of each plug-in that is not below ``root``."""
    for kind in JOB_KINDS:
        for folder in folders(kind).values():
            if not folder.path.is_relative_to(root):
                yield f"{PLUGINS}/{kind}/{folder.name}", folder.path
    for number, path in enumerate(path for vendor in folders("vendors") for path in extensions(vendor)):
        yield f"{PLUGINS}/extensions/{number}/{path.name}", path


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for file in sorted(files):
            if not file.endswith(".pyc"):
                path = Path(directory, file)
                yield path.relative_to(root).as_posix(), path


def delivery_command(python: str, code: PurePosixPath) -> list[str]:
    """Return the command on a host that receives the wheel and unpacks it at ``code``."""
    return command(python, "wheel", str(code), wheel().sha256, str(len(wheel().content)))


async def deliver(host: Host, python: str, code: PurePosixPath) -> None:
    """Unpack the wheel at ``code`` on a host where it is missing. Raises HostError: it could not be written."""
    if (await host.run(["test", "-d", str(code)])).code == 0:
        return
    argv = delivery_command(python, code)
    await host.require(argv, "AccelMark could not be delivered", wheel().content, timeout_s=None)


async def put_files(host: Host, python: str, files: Mapping[PurePosixPath, str]) -> None:
    """Write text files on a host, each complete or not at all; raises HostError if they cannot be written."""
    contents = {str(path): text.encode() for path, text in files.items()}
    header = [[path, hashlib.sha256(content).hexdigest(), len(content)] for path, content in contents.items()]
    stdin = b"".join([json.dumps(header).encode(), b"\n", *contents.values()])
    await host.require(command(python, "files"), "files could not be written", stdin)
