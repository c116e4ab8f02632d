"""``sys_info.json``: what a host is, as far as it can be read without a framework or root."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil

import accelmark
from accelmark.run.files import free_mib
from accelmark.run.states import utc_now

_TOLD: Final = ("OMP_", "MKL_", "KMP_", "GLOO_", "NCCL_", "TORCH", "PYTORCH_", "CUDA_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of the variables that change how a job runs; others may hold secrets and are not told."""
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def system_information(node_dir: Path, environment: dict[str, str], host: str, *told: str) -> dict[str, Any]:
    """Describe this host; an entry that cannot be read is null. ``told`` are further variables to tell."""
    memory = psutil.virtual_memory()
    return {
        "host": host,
        "hostname": platform.node(),
        "taken_at": utc_now(),
        "accelmark": accelmark.__version__,
        "python": platform.python_version(),
        "python_executable": sys.executable,
        "os": _os_release(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "virtual_machine": "hypervisor" in _first("flags", "Features").split(),
        "cpu": {
            "model": _first("model name", "Model", "cpu model") or platform.processor() or None,
            "logical_cores": psutil.cpu_count(),
            "physical_cores": psutil.cpu_count(logical=False),
            "usable_cores": len(os.sched_getaffinity(0)),
            "sockets": _sockets(),
            "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
            "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "max_mhz": _max_mhz(),
        },
        "memory_total_mib": memory.total / 2**20,
        "memory_available_mib": memory.available / 2**20,
        "swap_total_mib": psutil.swap_memory().total / 2**20,
        "cgroup_memory_limit": _read("/sys/fs/cgroup/memory.max"),
        "load1_at_start": os.getloadavg()[0],
        "disk_free_mib": free_mib(node_dir),
        "environment": _told(environment, told),
    }


def _told(environment: dict[str, str], more: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in more or (name.startswith(_TOLD) and not any(word in name for word in _SECRET))
    }


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cpuinfo() -> Iterable[tuple[str, str]]:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _first(*names: str) -> str:
    return next((value for name, value in _cpuinfo() if name in names), "")


def _sockets() -> int | None:
    return len({value for name, value in _cpuinfo() if name == "physical id"}) or None


def _max_mhz() -> float | None:
    text = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return int(text) / 1000 if text and text.isdigit() else None


def _os_release() -> str | None:
    for line in (_read("/etc/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return None
