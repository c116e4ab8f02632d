"""``sys_info.json`` of a job: hardware and software of the host, and its state before the job."""

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

_REPORTED: Final = ("OMP_", "MKL_", "KMP_", "GLOO_", "NCCL_", "CUDA_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of the variables that change how a job runs; others may hold secrets and are not recorded."""


def system_information(node_dir: Path, environment: dict[str, str], host: str, *reported: str) -> dict[str, Any]:
    """Describe this host, observing its load for half a second; an entry that cannot be read is null.

    ``reported`` are prefixes of further variables to record.
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
        "environment": _recorded(environment, (*_REPORTED, *reported), node_dir),
    }


def _recorded(environment: dict[str, str], prefixes: tuple[str, ...], node_dir: Path) -> dict[str, str]:
    """Leave out secrets, and values that name a directory of this round only, such as that of a cache."""
    return {
        name: without_userinfo(value)
        for name, value in sorted(environment.items())
        if name.startswith(prefixes) and not is_secret(name) and not value.startswith(f"{node_dir}{os.sep}")
    }
