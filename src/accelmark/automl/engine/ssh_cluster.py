"""A Ray cluster on a list of SSH hosts, started and stopped by us, with nothing left behind.

On every host runs ``ray_host``, which starts Ray as its child and ends it when its standard input closes: when we close
it, when the connection breaks, or when this process is killed. The cluster's token travels on that input too, never
on a command line.
"""

from __future__ import annotations

import json
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Final

from accelmark.automl.config import SshCluster
from accelmark.automl.engine.ray_token import guarded
from accelmark.spec.errors import RunError

_START_S: Final = 120.0
_END_S: Final = 30.0
_MODULE: Final = "accelmark.automl.engine.ray_host"
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


@contextmanager
def ssh_cluster(cluster: SshCluster) -> Iterator[str]:
    """Start Ray's head here and a node on every host; give the head's address; stop all at the end.

    Raises RunError naming the host that could not be started and what it said.
    """
    head_ip = cluster.head_address or own_address(cluster.hosts[0])
    address = f"{head_ip}:{cluster.port}"
    with ExitStack() as stack:
        token = stack.enter_context(guarded())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True))
        head = {"role": "head", "address": head_ip, "port": cluster.port, "token": token, "folder": folder}
        stack.enter_context(_node("this machine", [sys.executable, "-m", _MODULE], head))
        config = () if cluster.ssh_config is None else ("-F", str(cluster.ssh_config))
        for host in cluster.hosts:
            # The one place where words become a shell's line: ssh joins them for the shell on the other side.
            remote = shlex.join([cluster.python, "-m", _MODULE])
            node = {"role": "node", "address": address, "token": token}
            stack.enter_context(_node(host, [*_SSH, *config, host, "--", remote], node))
        yield address


def own_address(host: str) -> str:
    """Return this machine's address as a route to ``host`` has it; raises RunError when there is no route."""
    name = host.rpartition("@")[2]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"{name}: no route to this host ({error}); give cluster.head_address") from error


@contextmanager
def _node(name: str, command: list[str], request: Mapping[str, object]) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        try:
            _tell(process.stdin, request)
            _wait_until_up(name, process, errors)
            yield
        finally:
            _end(process)


def _tell(stream: IO[str] | None, request: Mapping[str, object]) -> None:
    if stream is None:
        raise RunError("the node program has no input")
    try:
        stream.write(json.dumps(request) + "\n")
        stream.flush()
    except BrokenPipeError:
        return  # the program is gone; what it said is told by who waits for it


def _wait_until_up(name: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
    deadline = time.monotonic() + _START_S
    if process.stdout is None:
        raise RunError("the node program has no output")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(timeout=1.0):
                continue
            line = process.stdout.readline()
            if line.strip() == "up":
                return
            if not line:
                break
    errors.seek(0)
    said = [text.strip() for text in errors.read().splitlines() if text.strip()]
    raise RunError(f"{name}: Ray could not be started there: {said[-1] if said else 'it said nothing in time'}")


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
