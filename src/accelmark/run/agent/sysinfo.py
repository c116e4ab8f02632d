"""``sys_info.json`` of a job: what the host is, and the state in which the job found it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import psutil

import accelmark
from accelmark.results.store.files import free_mib
from accelmark.run.record.states import utc_now
from accelmark.spec.secret import is_secret, without_userinfo
from accelmark.telemetry.host.sampler import busy_host
from accelmark.telemetry.host.sysinfo import collect

_TOLD: Final = ("OMP_", "MKL_", "KMP_", "GLOO_", "NCCL_", "TORCH", "PYTORCH_", "CUDA_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of the variables that change how a job runs; others may hold secrets and are not told."""


def system_information(node_dir: Path, environment: dict[str, str], host: str, *told: str) -> dict[str, Any]:
    """Describe this host, watching it for half a second; an entry that cannot be read is null.

    ``told`` are further variables to tell.
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
        "environment": _told(environment, told, node_dir),
    }


def _told(environment: dict[str, str], more: tuple[str, ...], node_dir: Path) -> dict[str, str]:
    """Leave out what only names a place of this round, such as that of what is compiled: each round has its own."""
    return {
        name: without_userinfo(value)
        for name, value in sorted(environment.items())
        if name in more
        or (name.startswith(_TOLD) and not is_secret(name) and not value.startswith(f"{node_dir}{os.sep}"))
    }
