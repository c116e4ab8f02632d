"""Processes on this machine: identity, descendants, signals.

``python -m accelmark.run.processes NODE_DIR`` kills processes left by a killed agent, and prints their number.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from accelmark.spec.model import Spec

RUN_MARKER: Final = "ACCELMARK_RUN"
"""Environment variable that every process of a run inherits; its value is the run's name."""
NODE_MARKER: Final = "ACCELMARK_NODE_DIR"
"""Environment variable that every process of one job on one host inherits."""

_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


@final
@dataclass(frozen=True, slots=True)
class Stat:
    """A process, from ``/proc/<pid>/stat``."""

    pid: int
    parent: int
    state: str
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> Self | None:
        """Return the process ``pid``; None where there is none."""
        try:
            text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text[text.rindex(")") + 2 :].split()
        return cls(pid=pid, parent=int(fields[1]), state=fields[0], start_ticks=int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether it runs and is no zombie."""
        return self.state not in "ZX"


class ProcessId(Spec):
    """A unique process identity: process ID, start time and boot, so that a reused process ID differs."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of the running process ``pid``; None where there is none."""
        stat = Stat.read(pid)
        return None if stat is None else cls(pid=pid, start_ticks=stat.start_ticks, boot_id=boot_id())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read an identity from ``path``; None where there is none."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def alive(self) -> bool:
        """Whether this process still runs."""
        stat = Stat.read(self.pid)
        return stat is not None and stat.alive and stat.start_ticks == self.start_ticks and boot_id() == self.boot_id

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process; returns whether it was running."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def boot_id() -> str:
    """Return the ID of the machine's current boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init.

    Raises:
        OSError: the kernel refuses (before Linux 3.4).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def all_processes() -> list[Stat]:
    """Return every visible process."""
    found = (Stat.read(int(entry)) for entry in os.listdir(_PROC) if entry.isdigit())  # noqa: PTH208  thousands of names
    return [stat for stat in found if stat is not None]


def descendants(root: int) -> list[Stat]:
    """Return the running descendants of process ``root``, nearest first, without ``root``."""
    children: dict[int, list[Stat]] = {}
    for stat in all_processes():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    frontier = [root]
    while frontier:
        below = [child for pid in frontier for child in children.get(pid, [])]
        found.extend(child for child in below if child.alive)
        frontier = [child.pid for child in below]
    return found


def marked(variable: str, value: str) -> list[int]:
    """Return the running processes, except this one, whose environment has ``variable=value``."""
    needle = f"{variable}={value}".encode()
    found: list[int] = []
    for stat in all_processes():
        if not stat.alive or stat.pid == os.getpid():
            continue
        try:
            environment = (_PROC / str(stat.pid) / "environ").read_bytes().split(b"\0")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM):
                raise
            continue
        if needle in environment:
            found.append(stat.pid)
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still runs and belongs to this user."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def sweep(node_dir: Path, timeout_s: float = 5.0) -> int:
    """Kill the processes of the job in ``node_dir``, by the marker in their environment; returns their number.

    For processes left by a killed agent.
    """
    swept: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while (left := marked(NODE_MARKER, str(node_dir))) and time.monotonic() < deadline:
        swept.update(left)
        signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(swept)


if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))
