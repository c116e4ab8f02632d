"""Ray clusters of a search: on this machine, at an address, or started on SSH hosts; access by token."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

from accelmark.automl.config import AddressCluster, ClusterConfig, LocalCluster, SshCluster
from accelmark.run.host import HostError
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.delivery import deliver, wheel
from accelmark.run.launchers.ssh.options import Options
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
            with _token_required(_token()):
                yield None
        case AddressCluster(address=address):
            _check_port(address)
            # Unlike ``ray start``, a client does not use this machine's token by default.
            file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
            exists = os.environ.get("RAY_AUTH_TOKEN") or file.is_file()
            with _token_required() if exists and "RAY_AUTH_MODE" not in os.environ else nullcontext():
                yield address
        case SshCluster():
            with ssh_cluster(cluster) as address:
                yield address


@cache
def _token() -> str:
    """Return one token for all clusters of this process, since Ray keeps the first that it reads."""
    return secrets.token_hex(32)


@contextmanager
def _token_required(token: str | None = None) -> Iterator[None]:
    """Make Ray require an access token: this one, which is not written to a file; for None this machine's own."""
    values = {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN": token} if token else {})
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


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
    nodes = AsyncExitStack()

    def call(coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    thread.start()
    with _token_required(token := _token()), TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        head = {"role": "head", "address": head_ip, "port": cluster.port, "token": token, "folder": folder}
        try:
            call(nodes.enter_async_context(_ray_node(cluster, None, head)))
            for host in cluster.hosts:
                node = {"role": "node", "address": address, "token": token}
                call(nodes.enter_async_context(_ray_node(cluster, host, node)))
            yield address
        finally:
            call(nodes.aclose())
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


@asynccontextmanager
async def _ray_node(cluster: SshCluster, host: str | None, request: Mapping[str, object]) -> AsyncIterator[None]:
    """Run ``ray_node`` on a host, or for None on this machine, until the context ends; its exit ends Ray.

    Raises:
        RunError: Ray does not run in time.
    """
    failed = f"{host or 'this machine'}: Ray cannot be started"
    async with AsyncExitStack() as stack:
        try:
            if host is None:
                process: Any = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", _MODULE, stdin=PIPE, stdout=PIPE, stderr=PIPE
                )
            else:
                process = await _open(cluster, host, stack)
            stack.push_async_callback(_end, process)
            process.stdin.write(json.dumps(request).encode() + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        except HostError as error:
            raise RunError(f"{failed}: {error.what}") from error
        except TimeoutError as error:
            raise RunError(f"{failed}: no answer within {_START_S:g} s") from error
        if line.strip() != b"up":
            errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise RunError(f"{failed}: {errors[-1] if errors else 'no error output'}")
        yield


async def _open(cluster: SshCluster, host: str, stack: AsyncExitStack) -> Any:
    """Deliver AccelMark to a host and start ``ray_node`` there; the stack closes the connection."""
    user, _, name = host.rpartition("@")
    options = Options(work_directory=cluster.work_directory, ssh_config=cluster.ssh_config)
    connection = SshConnection(HostSpec(address=name, user=user or None), options)
    stack.push_async_callback(connection.close)
    code = PurePosixPath(cluster.work_directory) / "code" / wheel().directory
    await deliver(connection, cluster.python, code)
    return await connection.open(["env", f"PYTHONPATH={code}", cluster.python, "-m", _MODULE])


async def _end(process: Any) -> None:
    """Close the input of ``ray_node`` and wait until it has ended Ray; kill it where it does not on this machine."""
    with suppress(OSError, TimeoutError):
        process.stdin.write_eof()
        await asyncio.wait_for(process.wait(), _END_S)
    if isinstance(process, asyncio.subprocess.Process) and process.returncode is None:
        process.kill()
        await process.wait()
