"""Detect processes on a run's devices and host that do not belong to the run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

import psutil

from accelmark.telemetry.device import DeviceSample


def family(roots: Iterable[int]) -> list[psutil.Process]:
    """Return the running processes ``roots`` and all their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(found.values())


def foreign_processes(devices: Iterable[DeviceSample], own: Collection[int]) -> list[str]:
    """Describe the processes on ``devices`` that are neither in ``own`` nor descendants of one of them.

    A process that is not visible (in another container) counts as foreign. The program is named without its arguments,
    which may contain secrets.
    """
    known = {*own, *(process.pid for process in family(own))}
    return [
        f"process {pid} ({_program_name(pid)}) on device {device.index}"
        for device in devices
        for pid in device.pids or ()
        if pid not in known
    ]


def _program_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name() or "name not visible"
    except psutil.Error:
        return "name not visible"
