"""Ray clusters of a search: on this machine, at an address, or started on SSH hosts; access by token."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from accelmark.automl.config import AddressCluster, ClusterConfig, LocalCluster, SshCluster
from accelmark.run.host import HostError
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.deliver import deliver
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.launchers.ssh.wheel import wheel
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError

_ADDRESS_TIMEOUT_S: Final = 10.0
_START_S: Final = 120.0
_END_S: Final = 30.0
_MODULE: Final = "accelmark.automl.workers.ray_node"


@contextmanager
def cluster_address(cluster: ClusterConfig) -> Iterator[str | None]:
    """Provide a cluster; yield its address, or None where the worker pool starts Ray on this machine."""
    match cluster:
        case LocalCluster():
            with own_token():
                yield None
        case AddressCluster(address=address):
            _check_port(address)
            with _existing_token():
                yield address
        case SshCluster():
            with ssh_cluster(cluster) as address:
                yield address


@cache
def _token() -> str:
    """Return one token for all clusters of this process, since Ray keeps the first that it reads."""
    return secrets.token_hex(32)


@contextmanager
def own_token() -> Iterator[str]:
    """Require an access token in clusters that are started in this context; it is not written to a file."""
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}):
        yield _token()


@contextmanager
def _existing_token() -> Iterator[None]:
    """Use this machine's Ray token, if there is one; unlike ``ray start``, a client does not do so by default."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    exists = bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    use = exists and "RAY_AUTH_MODE" not in os.environ
    with _environment({"RAY_AUTH_MODE": "token"} if use else {}):
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_port(address: str) -> None:
    """Raise RunError where nothing listens at ``host:port``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # another form that Ray accepts
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ADDRESS_TIMEOUT_S).close()
    except OSError as error:
        raise RunError(f"cannot connect to Ray at {address}: {error}; check that the cluster runs") from error


@contextmanager
def ssh_cluster(cluster: SshCluster) -> Iterator[str]:
    """Start Ray's head here and a node on every host; yield the head's address; end all of them afterwards.

    AccelMark is delivered to the hosts. Each runs ``ray_node``, which ends Ray when its input closes: at the end, when
    the connection breaks, or when this process is killed. The token is sent on that input.

    Raises:
        RunError: a host cannot be reached or Ray does not start there; the host is named.
    """
    head_ip = cluster.head_address or _route_address(cluster.hosts[0])
    address = f"{head_ip}:{cluster.port}"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ssh cluster", daemon=True)
    nodes: list[_Node] = []

    def call(coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def start(node: _Node, request: Mapping[str, object]) -> None:
        nodes.append(node)
        await node.start(request)

    thread.start()
    with ExitStack() as stack:
        token = stack.enter_context(own_token())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True))
        try:
            head = {"role": "head", "address": head_ip, "port": cluster.port, "token": token, "folder": folder}
            call(start(_Node("this machine", cluster), head))
            for host in cluster.hosts:
                user, _, name = host.rpartition("@")
                spec = HostSpec(address=name, user=user or None)
                call(start(_Node(host, cluster, spec), {"role": "node", "address": address, "token": token}))
            yield address
        finally:
            for node in reversed(nodes):
                call(node.end())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def _route_address(host: str) -> str:
    """Return this machine's source address of a route to ``host``."""
    name = host.rpartition("@")[2]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"{name}: there is no route to this host ({error}); give cluster.head_address") from error


class _Node:
    """A ``ray_node`` on a host, or without one on this machine."""

    def __init__(self, name: str, cluster: SshCluster, host: HostSpec | None = None) -> None:
        self._name: Final = name
        self._python: Final = cluster.python
        self._work: Final = PurePosixPath(cluster.work_directory)
        options = Options(work_directory=cluster.work_directory, ssh_config=cluster.ssh_config)
        self._connection: Final = None if host is None else SshConnection(host, options)
        self._process: Any = None

    async def start(self, request: Mapping[str, object]) -> None:
        """Start Ray; raises RunError where it does not run in time."""
        try:
            self._process = await self._open()
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            line = await asyncio.wait_for(self._process.stdout.readline(), _START_S)
        except HostError as error:
            raise RunError(f"{self._name}: Ray cannot be started: {error.what}") from error
        except TimeoutError as error:
            raise RunError(f"{self._name}: Ray cannot be started: no answer within {_START_S:g} s") from error
        if line.strip() != b"up":
            errors = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise RunError(f"{self._name}: Ray cannot be started: {errors[-1] if errors else 'no error output'}")

    async def _open(self) -> Any:
        if self._connection is None:
            pipe = asyncio.subprocess.PIPE
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, stdin=pipe, stdout=pipe, stderr=pipe
            )
        code = self._work / "code" / wheel().directory
        await deliver(self._connection, self._python, code)
        return await self._connection.open(["env", f"PYTHONPATH={code}", self._python, "-m", _MODULE])

    async def end(self) -> None:
        """Close the input of ``ray_node`` and wait until it has ended Ray."""
        if self._process is not None:
            with suppress(OSError, TimeoutError):
                self._process.stdin.write_eof()
                await asyncio.wait_for(self._process.wait(), _END_S)
            if self._connection is None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        if self._connection is not None:
            await self._connection.close()
