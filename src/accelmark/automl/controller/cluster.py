"""Ray clusters of a search: on this machine, at an address, or started on SSH hosts; access by token."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

from accelmark.automl.config import AddressCluster, ClusterConfig, LocalCluster, SshCluster
from accelmark.automl.pool import environment_restored
from accelmark.run.agent.host import source_address
from accelmark.run.host import Host, HostError, SubprocessHost
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.delivery import deliver, wheel
from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError, raising

_ADDRESS_TIMEOUT_S: Final = 10.0
_START_S: Final = 120.0
_MODULE: Final = "accelmark.automl.trial.ray_node"
_TOKEN: Final = secrets.token_hex(32)
"""One for all clusters of this process, since Ray keeps the first that it reads."""


@contextmanager
def cluster_address(cluster: ClusterConfig) -> Iterator[str | None]:
    """Provide a cluster; yield its address, or None where the worker pool starts Ray on this machine."""
    with environment_restored():
        match cluster:
            case LocalCluster(environment=variables):
                os.environ.update(variables)
                _require_token(_TOKEN)
                yield None
            case AddressCluster(address=address):
                _check_port(address)
                # Unlike ``ray start``, a client does not use this machine's token by default.
                file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
                if "RAY_AUTH_MODE" not in os.environ and (os.environ.get("RAY_AUTH_TOKEN") or file.is_file()):
                    _require_token()
                yield address
            case SshCluster():
                with ssh_cluster(cluster) as address:
                    yield address


def _require_token(token: str | None = None) -> None:
    """Make Ray require an access token: this one, which is not written to a file; for None this machine's own."""
    os.environ.update({"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN": token} if token else {}))


def _check_port(address: str) -> None:
    """Raise RunError where nothing listens at ``host:port``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # another form that Ray accepts
    with raising(RunError, f"cannot connect to Ray at {address}: check that the cluster runs", OSError):
        socket.create_connection((host.strip("[]"), int(port)), _ADDRESS_TIMEOUT_S).close()


@contextmanager
def ssh_cluster(cluster: SshCluster) -> Iterator[str]:
    """Start Ray's head here and a node on every host; yield the head's address; end all of them afterwards.

    AccelMark is delivered to the hosts. Each runs ``ray_node``, which ends Ray when its input closes: at the end, when
    the connection breaks, or when this process is killed. The token is sent on that input.

    Raises RunError with the host where one cannot be reached or Ray does not start there.
    """
    first = cluster.hosts[0].rpartition("@")[2]
    with raising(RunError, f"{first}: there is no route to this host: give cluster.head_address", OSError):
        head_ip = cluster.head_address or source_address(first, cluster.port)
    address = f"{head_ip}:{cluster.port}"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ssh cluster", daemon=True)
    nodes = AsyncExitStack()

    def call(coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    thread.start()
    with environment_restored(), TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        _require_token(_TOKEN)
        common = {"token": _TOKEN, "ray": importlib.metadata.version("ray")}
        head = common | {"role": "head", "address": head_ip, "port": cluster.port, "folder": folder}
        try:
            call(_start(nodes, cluster, None, head))
            for host in cluster.hosts:
                call(_start(nodes, cluster, host, common | {"role": "node", "address": address}))
            yield address
        finally:
            call(nodes.aclose())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def initialised(script: Path, command: Sequence[str]) -> list[str]:
    """Return the command that reads a shell script, whose output goes to the errors, and then becomes ``command``."""
    return ["bash", "-c", '. "$0" >&2 && exec "$@"', str(script), *command]


async def _start(nodes: AsyncExitStack, cluster: SshCluster, host: str | None, request: Mapping[str, object]) -> None:
    """Start ``ray_node`` on a host, or for None on this machine; ``nodes`` closes its input, which ends Ray."""
    place: Host = SubprocessHost(HostSpec(address="localhost"))
    python = [sys.executable]
    try:
        if host is not None:
            user, _, name = host.rpartition("@")
            options = Options(work_directory=cluster.work_directory, ssh_config=cluster.ssh_config)
            place = connection = SshConnection(HostSpec(address=name, user=user or None), options)
            nodes.push_async_callback(connection.close)
            code = PurePosixPath(cluster.work_directory) / "code" / wheel().directory
            await deliver(connection, cluster.python, code)
            variables = {**cluster.environment.get(host, {}), "PYTHONPATH": str(code)}
            python = ["env", *(f"{variable}={value}" for variable, value in variables.items()), cluster.python]
            if cluster.init_script is not None:
                python = initialised(cluster.init_script, python)
        line = json.dumps(request).encode() + b"\n"
        await nodes.enter_async_context(place.running([*python, "-m", _MODULE], line, _START_S))
    except HostError as error:
        raise RunError(f"{host or 'this machine'}: Ray cannot be started: {error.what}") from error
    except TimeoutError as error:
        raise RunError(f"{host or 'this machine'}: Ray cannot be started: no answer within {_START_S:g} s") from error
