"""Detect processes on a run's devices and host that do not belong to the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from accelmark.telemetry.device import DeviceSample

PROC: Final = Path("/proc")


def parents(proc: Path = PROC) -> dict[int, int]:
    """Return process id -> parent's id of every visible process."""
    found: dict[int, int] = {}
    for process in proc.glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text(errors="replace")
            # The program's name is in parentheses and may contain any character, parentheses too.
            found[int(process.name)] = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return found


def descendants(roots: Iterable[int], parent_of: Mapping[int, int]) -> frozenset[int]:
    """Return ``roots`` and all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, []).append(pid)
    family: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting.extend(children.get(pid, ()))
    return frozenset(family)


def foreign_processes(
    devices: Iterable[DeviceSample], own: Iterable[int], parent_of: Mapping[int, int], proc: Path = PROC
) -> list[str]:
    """Describe the processes on ``devices`` that are neither in ``own`` nor descendants of one of them.

    A process that is not visible (in another container) counts as foreign. The program is named without its arguments,
    which may contain secrets.
    """
    family = descendants(own, parent_of)
    return [
        f"process {pid} ({_program_name(proc / str(pid))}) on device {device.index}"
        for device in devices
        for pid in device.pids or ()
        if pid not in family
    ]


def _program_name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip() or "name not visible"
    except OSError:
        return "name not visible"
