"""Prepare a host before the ranks start: lock it, drop caches, find the network interface to the other hosts."""

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
"""Path of the host's drop_caches file inside a container."""


class HostInUseError(AccelmarkError):
    """Another run has locked this host."""


@contextmanager
def host_lock(lock: Path | None, run: str) -> Iterator[None]:
    """Lock the host for one job; the lock ends with the agent.

    Raises:
        HostInUseError: another run has locked it.
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
            raise HostInUseError(f"the host is in use by {holder}: wait until it ends, or stop it") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, run.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def clear_caches() -> str | None:
    """Drop the page cache; returns a message where that failed."""
    os.sync()
    try:
        Path(os.environ.get(DROP_CACHES_VARIABLE, DROP_CACHES)).write_text("3", encoding="ascii")
    except OSError as error:
        return f"{DROP_CACHES}: {error.strerror} (it needs root)"
    return None


def route(task: AgentTask) -> AgentTask:
    """Return the task with the address at which the other hosts reach this one, and the network interface that has it.

    The address is the source address of packets to host 0; on host 0 it is the master address.
    """
    address = task.local_address or _source_address(task.master_address, task.master_port)
    interface = task.interface or _interface_of(address)
    return task.model_copy(update={"local_address": address, "interface": interface})


def _source_address(address: str, port: int) -> str | None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str | None) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
