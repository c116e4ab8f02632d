"""The host of a job: its lock, page cache, network interface, description, and CPU time of other processes."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

import accelmark
from accelmark.results.store.files import free_mib
from accelmark.run.agent.task import AgentTask
from accelmark.run.onhost.program import HOST_LOCK, holder
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.secret import is_secret, without_userinfo
from accelmark.telemetry.host import busy_host, collect

DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
DROP_CACHES_VARIABLE: Final = "ACCELMARK_DROP_CACHES"
"""Path of the host's drop_caches file inside a container."""
_REPORTED_PREFIXES: Final = ("OMP_", "MKL_", "KMP_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of variables that change how any job runs; others may hold secrets and are not recorded."""
_LONGEST_ADDRESS: Final = 100
"""Bytes of the lock's address, in which the name of the run is abridged."""
_NOT_BUSY: Final = ("idle", "iowait", "steal", "guest", "guest_nice")
"""Not time of this machine's processes, or included in another counter (guests in user and nice)."""


@contextmanager
def host_lock(run: str, wait: Callable[[], bool]) -> Iterator[None]:
    """Lock the host for one job; the lock ends with the agent. Raises RunError: another run has locked it.

    Then ``wait`` waits a moment and returns whether to try again. The lock is an abstract address of the host's
    network, so that it is one for all users, directories and containers.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock, socket.socket(socket.AF_UNIX) as name:
        while True:
            try:
                lock.bind(f"\0{HOST_LOCK}")
                break
            except OSError as error:
                if not wait():
                    who = holder() or "another run"
                    raise RunError(f"the host is in use by {who}: wait until it ends, or stop it") from error
        whole_letters = f"{HOST_LOCK}/{run}".encode()[: _LONGEST_ADDRESS - 1].decode(errors="ignore")
        name.bind(f"\0{whole_letters}")
        yield


def clear_caches() -> str | None:
    """Drop the page cache; returns a message where that failed."""
    os.sync()
    try:
        Path(os.environ.get(DROP_CACHES_VARIABLE, DROP_CACHES)).write_text("3", encoding="ascii")
    except OSError as error:
        return f"{DROP_CACHES}: {error.strerror} (it needs root)"
    return None


def route(task: AgentTask) -> AgentTask:
    """Return the task with this host's address for the other hosts, and the network interface of the address.

    The address is the source address of packets to host 0; on host 0 it is the master address.
    """
    address = task.local_address
    with suppress(OSError):
        address = address or source_address(task.master_address, task.master_port)
    entries = psutil.net_if_addrs().items()
    names = (name for name, addresses in entries if any(item.address == address for item in addresses))
    return task.model_copy(update={"local_address": address, "interface": task.interface or next(names, None)})


def source_address(address: str, port: int) -> str:
    """Return the address of this host from which it sends packets to another; raises OSError without a route."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def reported_prefixes(task: AgentTask, framework: FrameworkSpec) -> tuple[str, ...]:
    """Return the prefixes of the variables that are recorded with a job: the host's, the framework's, the vendor's."""
    visible = (task.visible_devices.variable,) if task.visible_devices is not None else ()
    return (*_REPORTED_PREFIXES, *framework.reported_variables, *task.reported_variables, *visible)


def system_information(
    node_dir: Path, environment: Mapping[str, str], host: str, reported: tuple[str, ...]
) -> dict[str, Any]:
    """Return ``sys_info.json``: hardware, software and load of this host; an entry that cannot be read is null.

    ``reported`` are the prefixes of the variables to record. The load is observed for half a second.
    """
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
            if name.startswith(reported)
            and not is_secret(name)
            and not value.startswith(f"{node_dir}{os.sep}")  # names a directory of this round only, such as a cache
        },
    }


def others_cpu_s() -> float | None:
    """Return the CPU time since boot of processes outside this job, in seconds; None where the kernel has none.

    This process must reap all processes of the job.
    """
    try:
        times = psutil.cpu_times()._asdict()
    except (OSError, RuntimeError):
        return None
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return float(sum(spent for name, spent in times.items() if name not in _NOT_BUSY)) - own_s
