"""What a node agent does to its host before the ranks start: hold it, drop caches, find the way to the other hosts."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from accelmark.run.agent.task import AgentTask
from accelmark.spec.errors import AccelmarkError

DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
DROP_CACHES_VARIABLE: Final = "ACCELMARK_DROP_CACHES"
"""Names the host's own file inside a container."""


class HostInUseError(AccelmarkError):
    """Another run holds this host."""


@contextmanager
def hold(lock: Path | None, run: str) -> Iterator[None]:
    """Hold the host for one job; a killed agent holds nothing.

    Raises:
        HostInUseError: another run holds it; it is named.
    """
    if lock is None:
        yield
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another run"
            raise HostInUseError(f"the host is in use by {holder}: wait for its end, or end it") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, run.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def clear_caches() -> str | None:
    """Drop the page cache; returns why it could not, for people."""
    os.sync()
    try:
        Path(os.environ.get(DROP_CACHES_VARIABLE, DROP_CACHES)).write_text("3", encoding="ascii")
    except OSError as error:
        return f"{DROP_CACHES}: {error.strerror} (it needs root)"
    return None


def route(task: AgentTask) -> AgentTask:
    """Return the task with the address at which the other hosts reach this one, and the network interface that has it.

    The address is the one that packets to host 0 leave from; at host 0 it is the master address itself.
    """
    address = task.local_address or _address_towards(task.master_address, task.master_port)
    interface = task.interface or _interface_with(address)
    return task.model_copy(update={"local_address": address, "interface": interface})


def _address_towards(address: str, port: int) -> str | None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect(place)
            return str(trial.getsockname()[0])
    except OSError:
        return None


def _interface_with(address: str | None) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
