"""Ray clusters of a search: on this machine, at an address, or started on SSH hosts; access by token."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Final

from accelmark.automl.config import AddressCluster, ClusterConfig, LocalCluster, SshCluster
from accelmark.spec.errors import RunError

_ADDRESS_TIMEOUT_S: Final = 10.0
_START_S: Final = 120.0
_END_S: Final = 30.0
_MODULE: Final = "accelmark.automl.workers.ray_node"
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


@contextmanager
def cluster_address(cluster: ClusterConfig) -> Iterator[str | None]:
    """Provide a cluster; give its address, None for a Ray that the worker pool starts on this machine."""
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
    """Return one token for all clusters of this process: Ray keeps the first that it reads."""
    return secrets.token_hex(32)


@contextmanager
def own_token() -> Iterator[str]:
    """Require a token of this process in clusters that are started in this context; it is written to no file."""
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}):
        yield _token()


@contextmanager
def _existing_token() -> Iterator[None]:
    """Use this machine's Ray token, if there is one: a client does not by itself, unlike ``ray start``."""
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
    """Start Ray's head here and a node on every host; give the head's address; end all at the end.

    Each runs ``ray_node``, which ends Ray when its input closes: at the end, when the connection breaks, or when this
    process is killed. The token travels on that input.

    Raises:
        RunError: a host cannot be reached or Ray does not start there; the host is named.
    """
    head_ip = cluster.head_address or _route_address(cluster.hosts[0])
    address = f"{head_ip}:{cluster.port}"
    config = () if cluster.ssh_config is None else ("-F", str(cluster.ssh_config))
    with ExitStack() as stack:
        token = stack.enter_context(own_token())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True))
        head = {"role": "head", "address": head_ip, "port": cluster.port, "token": token, "folder": folder}
        stack.enter_context(_node("this machine", [sys.executable, "-m", _MODULE], head))
        for host in cluster.hosts:
            remote = shlex.join([cluster.python, "-m", _MODULE])  # ssh passes one line to the host's shell
            node = {"role": "node", "address": address, "token": token}
            stack.enter_context(_node(host, [*_SSH, *config, host, "--", remote], node))
        yield address


def _route_address(host: str) -> str:
    """Return this machine's source address of a route to ``host``."""
    name = host.rpartition("@")[2]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"{name}: there is no route to this host ({error}); give cluster.head_address") from error


@contextmanager
def _node(name: str, command: list[str], request: Mapping[str, object]) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        try:
            with suppress(BrokenPipeError):  # the reason is read from its errors
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            if not _is_up(process.stdout):
                errors.seek(0)
                lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
                raise RunError(f"{name}: Ray cannot be started: {lines[-1] if lines else 'no answer in time'}")
            yield
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _is_up(stream: IO[str]) -> bool:
    """Wait for the line ``up``."""
    deadline = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(timeout=1.0):
                line = stream.readline()
                if line.strip() == "up" or not line:
                    return bool(line)
    return False
