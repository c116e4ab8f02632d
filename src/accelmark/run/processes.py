"""Processes on this machine: identity, descendants, signals.

``python -m accelmark.run.processes NODE_DIR`` kills processes left by a killed agent, and prints their number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import psutil
from typing_extensions import Self

from accelmark.spec.model import Spec

RUN_MARKER: Final = "ACCELMARK_RUN"
"""Environment variable that every process of a run inherits; its value is the run's name."""
NODE_MARKER: Final = "ACCELMARK_NODE_DIR"
"""Environment variable that every process of one job on one host inherits."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")
_BOOT_ID: Final = _PROC / "sys/kernel/random/boot_id"
"""Another text after each boot."""


class ProcessId(Spec):
    """A unique process identity: process ID, start time and boot, so that a reused process ID differs."""

    pid: int
    start_ticks: int
    """Since boot: unlike a time of day, it does not change where the clock is set."""
    boot_id: str
    hostname: str = ""
    """The machine, for messages; empty where it was not asked for."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of the running process ``pid``; None where there is none, or it is a zombie."""
        try:
            text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, *fields = text.rpartition(")")[2].split()
        return None if state in "ZX" else cls(pid=pid, start_ticks=int(fields[18]), boot_id=_boot_id())

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process."""
        identity = cls.of(os.getpid())
        assert identity is not None  # noqa: S101  a process can always see itself
        return identity.model_copy(update={"hostname": socket.gethostname()})

    @property
    def alive(self) -> bool:
        """Whether this process still runs, on this machine."""
        return self.model_copy(update={"hostname": ""}) == ProcessId.of(self.pid)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process was started on another machine, or before this one was booted."""
        return self.boot_id != _boot_id()

    def terminate(self) -> None:
        """Send SIGTERM to this process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            finally:
                os.close(descriptor)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(root: int, without: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the running descendants of process ``root``, without ``root``, zombies and those in ``without``."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(root).children(recursive=True)
        return [process for process in children if process not in without and is_alive(process)]
    return []


def named(pids: Iterable[int]) -> str:
    """Return the names of processes, sorted, each once; empty where none runs any more."""
    names = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            names.add(psutil.Process(pid).name())
    return ", ".join(sorted(names))


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each of this user's processes that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(node_dir: Path) -> int:
    """Kill the processes that a killed agent of the job in ``node_dir`` left, by their marker; returns their number."""
    swept: set[int] = set()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.pid != os.getpid() and process.environ().get(NODE_MARKER) == str(node_dir)
                left += [process.pid] if is_marked and is_alive(process) else []
        if not left:
            break
        swept.update(left)
        signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(swept)


if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))
