"""The host of a job: its lock, page cache, network interface, description, and CPU time of other processes."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

import psutil

import accelmark
from accelmark.results.store.files import free_mib
from accelmark.run.agent.task import AgentTask
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.secret import is_secret, without_userinfo
from accelmark.telemetry.host.sampler import busy_host
from accelmark.telemetry.host.sysinfo import collect

DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
DROP_CACHES_VARIABLE: Final = "ACCELMARK_DROP_CACHES"
"""Path of the host's drop_caches file inside a container."""
REPORTED_PREFIXES: Final = ("OMP_", "MKL_", "KMP_", "GLOO_", "NCCL_", "CUDA_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of the variables that change how a job runs; others may hold secrets and are not recorded."""
_NOT_BUSY: Final = ("idle", "iowait", "steal", "guest", "guest_nice")
"""Not time of this machine's processes, or included in another counter (guests in user and nice)."""


class HostInUseError(AccelmarkError):
    """Another run has locked this host."""


@contextmanager
def host_lock(lock: Path | None, run: str) -> Iterator[None]:
    """Lock the host for one job; the lock ends with the agent. Raises HostInUseError: another run has locked it."""
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
    address = task.local_address
    with suppress(OSError):
        address = address or source_address(task.master_address, task.master_port)
    own = (name for name, entries in psutil.net_if_addrs().items() if any(one.address == address for one in entries))
    return task.model_copy(update={"local_address": address, "interface": task.interface or next(own, None)})


def source_address(address: str, port: int) -> str:
    """Return the address of this host from which it sends packets to another; raises OSError without a route."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def system_information(
    node_dir: Path, environment: Mapping[str, str], host: str, reported: tuple[str, ...]
) -> dict[str, Any]:
    """Return ``sys_info.json``: hardware, software and load of this host; an entry that cannot be read is null.

    ``reported`` are prefixes of further variables to record. The load is observed for half a second.
    """
    prefixes = (*REPORTED_PREFIXES, *reported)
    return {
        "host": host,
        "taken_at": utc_now(),
        "accelmark": accelmark.__version__,
        "python_executable": sys.executable,
        **collect(),
        "memory_available_mib": psutil.virtual_memory().available / 2**20,
        "load1_at_start": os.getloadavg()[0],
        "busy_at_start": busy_host(),
        "disk_free_mib": free_mib(node_dir),
        "environment": {
            name: without_userinfo(value)
            for name, value in sorted(environment.items())
            if name.startswith(prefixes)
            and not is_secret(name)
            and not value.startswith(f"{node_dir}{os.sep}")  # names a directory of this round only, such as a cache
        },
    }


@final
class BackgroundLoad:
    """CPU time of processes outside this job since its creation; this process has to reap all processes of the job."""

    def __init__(self) -> None:
        self._began = _host_s(), _own_s()

    def cpu_s(self) -> float | None:
        """Return the CPU time of other processes, in seconds; None where the kernel does not report it."""
        host, own = _host_s(), _own_s()
        if host is None or self._began[0] is None:
            return None
        return max(0.0, (host - self._began[0]) - (own - self._began[1]))


def _host_s() -> float | None:
    try:
        times = psutil.cpu_times()._asdict()
    except (OSError, RuntimeError):
        return None
    return float(sum(spent for name, spent in times.items() if name not in _NOT_BUSY))


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
