"""Who else is on the machine: foreign processes on a device under test, and a host that is busy before a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.telemetry.sample import DeviceSample, HostSample

BUSY_CPU: Final = 0.2
"""Share of all cores that may be busy before a run."""
BUSY_PRESSURE: Final = 10.0
"""Percent of time that tasks may have waited for the CPU, memory or disk before a run."""


@final
@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a device under test that the run did not start."""

    device: int
    pid: int
    name: str | None
    """Name of the program, without its arguments (those may hold secrets); None where it cannot be seen."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name or 'not visible from here'}) is on device {self.device}"


def parents(proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the parent of every process that can be seen."""
    found: dict[int, int] = {}
    try:
        names = [path.name for path in proc.iterdir()]
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                stat = (proc / name / "stat").read_text(errors="replace")
                # The program's name stands in brackets and may hold anything, brackets too.
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    return found


def descendants(roots: Iterable[int], parent_of: Mapping[int, int]) -> frozenset[int]:
    """Return ``roots`` and all processes below them."""
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


def foreign(
    devices: Iterable[DeviceSample], own: Iterable[int], parent_of: Mapping[int, int], proc: Path = Path("/proc")
) -> tuple[ForeignProcess, ...]:
    """Return the processes on ``devices`` that are neither in ``own`` nor below one of them.

    A process that cannot be seen from here (another container's) counts as foreign.
    """
    family = descendants(own, parent_of)
    return tuple(
        ForeignProcess(device.index, pid, program_name(pid, proc))
        for device in devices
        for pid in device.pids or ()
        if pid not in family
    )


def program_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the name of a process's program, or None where it cannot be seen."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


def busy_reasons(sample: HostSample, num_cpus: int) -> tuple[str, ...]:
    """Return why a host is too busy to be measured; empty where it is quiet.

    Args:
        sample: the host while nothing of ours runs, with ``cpu`` over at least some tenths of a second.
        num_cpus: cores of the host.
    """
    reasons: list[str] = []
    if sample.cpu is not None and sample.cpu > BUSY_CPU:
        reasons.append(f"{sample.cpu:.0%} of the cores are busy (limit {BUSY_CPU:.0%})")
    limit = max(1.0, BUSY_CPU * num_cpus)
    if sample.cpu is None and sample.load1 is not None and sample.load1 > limit:
        reasons.append(f"load over the last minute is {sample.load1:.1f} (limit {limit:.1f} on {num_cpus} cores)")
    for resource, value in (("CPU", sample.psi_cpu), ("memory", sample.psi_memory), ("disks", sample.psi_io)):
        if value is not None and value > BUSY_PRESSURE:
            reasons.append(f"tasks waited for the {resource} {value:.0f} % of the time (limit {BUSY_PRESSURE:.0f} %)")
    return tuple(reasons)
