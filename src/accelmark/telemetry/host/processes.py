"""Detect processes on a run's devices and host that do not belong to the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.telemetry.device import DeviceSample

PROC: Final = Path("/proc")


@final
@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a measured device that the run did not start."""

    device: int
    pid: int
    name: str | None
    """Name of the program, without its arguments, which may contain secrets; None where it is not visible."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name or 'name not visible'}) on device {self.device}"


def parents(proc: Path = PROC) -> dict[int, int]:
    """Return process id -> parent's id of every visible process."""
    found: dict[int, int] = {}
    try:
        names = [path.name for path in proc.iterdir()]
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                stat = (proc / name / "stat").read_text(errors="replace")
                # The program's name is in parentheses and may contain any character, parentheses too.
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
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
) -> tuple[ForeignProcess, ...]:
    """Return the processes on ``devices`` that are neither in ``own`` nor descendants of one of them.

    A process that is not visible (in another container) counts as foreign.
    """
    family = descendants(own, parent_of)
    return tuple(
        ForeignProcess(device.index, pid, program_name(pid, proc))
        for device in devices
        for pid in device.pids or ()
        if pid not in family
    )


def program_name(pid: int, proc: Path = PROC) -> str | None:
    """Return the name of a process's program, or None where it is not visible."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None
