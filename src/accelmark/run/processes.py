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
from typing import Final, final

import psutil
from typing_extensions import Self

from accelmark.spec.model import Spec

RUN_MARKER: Final = "ACCELMARK_RUN"
"""Environment variable that every process of a run inherits; its value is the run's name."""
NODE_MARKER: Final = "ACCELMARK_NODE_DIR"
"""Environment variable that every process of one job on one host inherits."""

_RECORD_FILE: Final = ".processes"
"""In a node directory: identities of the agent's descendants, one in a line."""
_RECORD_S: Final = (1.0, 10.0)
"""Time until the first record of descendants, and between later ones."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")
BOOT_ID: Final = _PROC / "sys/kernel/random/boot_id"
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
        """Return the identity of the running process ``pid``; None where there is none."""
        start_ticks = _start_ticks(pid)
        return None if start_ticks is None else cls(pid=pid, start_ticks=start_ticks, boot_id=_boot_id())

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


def _start_ticks(pid: int) -> int | None:
    """Return when a process started; None where there is none, or it is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init.

    Raises OSError: the kernel refuses (before Linux 3.4).
    """
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


@final
class DescendantRecord:
    """Keeps the identities of this process's descendants in a file.

    If this process is killed, :func:`sweep` finds them by it, also those without the marker in their environment.
    """

    def __init__(self, node_dir: Path) -> None:
        self._path = node_dir / _RECORD_FILE
        self._due = time.monotonic() + _RECORD_S[0]
        self._known: set[int] = set()

    def update(self) -> None:
        """Look for descendants where it is time to, and write them where they changed; a full disk changes nothing."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _RECORD_S[1]
        pids = {process.pid for process in descendants(os.getpid())}
        if pids != self._known:
            lines = [identity.model_dump_json() for pid in sorted(pids) if (identity := ProcessId.of(pid)) is not None]
            with contextlib.suppress(OSError):
                partial = self._path.with_name(f"{_RECORD_FILE}.part")
                partial.write_text("".join(f"{line}\n" for line in lines))
                partial.replace(self._path)
                self._known = pids

    def remove(self) -> None:
        """Remove the file, once no descendant runs."""
        self._path.unlink(missing_ok=True)


def _recorded(node_dir: Path) -> list[ProcessId]:
    """Return the descendants that a killed agent recorded and that still run."""
    with contextlib.suppress(OSError, ValueError):
        lines = (node_dir / _RECORD_FILE).read_text().splitlines()
        return [identity for identity in map(ProcessId.model_validate_json, lines) if identity.alive]
    return []


def sweep(node_dir: Path, timeout_s: float = 5.0) -> int:
    """Kill the processes of the job in ``node_dir``; returns their number.

    For processes left by a killed agent: those that it recorded, and those with the marker in their environment.
    """
    swept = {process.pid for process in _recorded(node_dir) if process.send(signal.SIGKILL)}
    deadline = time.monotonic() + timeout_s
    while (left := _marked(NODE_MARKER, str(node_dir))) and time.monotonic() < deadline:
        swept.update(left)
        signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(swept)


def _marked(variable: str, value: str) -> list[int]:
    """Return the running processes, except this one, that have ``variable=value`` in their environment."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value and is_alive(process):
                pids.append(process.pid)
    return pids


if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))
