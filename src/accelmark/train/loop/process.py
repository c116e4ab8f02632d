"""The process of a rank: redirected output, start time, signals, and waits for a CPU."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

GRACE_S: Final = 20.0
"""Longest that a step may take after a signal; the launcher kills after 30 s."""
_GRACE_SECOND_SIGNAL_S: Final = 1.0
_SAME_REQUEST_S: Final = 1.0
"""A signal this soon after the first is the same request, sent to the process group and again by the launcher."""
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


class Cancelled(BaseException):
    """Raised where a signal stops the process at once."""


def redirect_output(path: Path) -> None:
    """Append descriptors 1 and 2 to ``path``, so that output of native libraries is included."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def process_start() -> float:
    """Return when this process started, on the clock of ``time.monotonic``, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age_s)


class Stop(Protocol):
    """A request to end training, which the driver checks after every step."""

    interruptible: bool
    """Set by the driver: whether a signal may raise at once."""

    @property
    def requested(self) -> str | None:
        """The source of the request, for the message of the end; None without a request."""


class StopRequest:
    """A request to stop this process, by a signal.

    At the first SIGTERM or SIGINT the loop completes the current step and then checks ``requested``; outside the loop,
    and at the second signal, :class:`Cancelled` is raised. A main thread that hangs in a collective cannot run Python's
    handlers, so a thread also waits for signals and calls ``on_overdue`` after the grace period.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        """Whether signals are handled; a test that runs a rank in its own process does not."""
        self.requested: str | None = None
        self._finished = False
        self._first_at = 0.0
        self.interruptible = True
        """Whether the first signal raises at once (outside the training loop)."""

    def install(self, on_overdue: Callable[[str], None], grace_s: float = GRACE_S) -> None:
        """Install the signal handlers, once; only the main thread can."""
        if not self.wanted or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in _STOPPING:
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader, on_overdue, grace_s), name="signals", daemon=True).start()

    def finish(self) -> None:
        """Ignore further signals, while the last event is written."""
        self._finished = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        second = self.requested is not None and now - self._first_at > _SAME_REQUEST_S
        if self.requested is None:
            self._first_at = now
        self.requested = signal.Signals(number).name
        if (second or self.interruptible) and not self._finished:
            raise Cancelled(self.requested)


def handle_signals_again() -> None:
    """Set the handlers of :class:`StopRequest` again, after native code (JAX, TensorFlow, Paddle) took SIGTERM."""
    for number in _STOPPING:
        handler = signal.getsignal(number)
        if isinstance(getattr(handler, "__self__", None), StopRequest):
            signal.signal(number, handler)


def _watch(reader: int, on_overdue: Callable[[str], None], grace_s: float) -> None:
    name = ""
    first = 0.0
    deadline: float | None = None
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([reader], [], [], wait)
        if not ready:
            on_overdue(name)
            return
        now = time.monotonic()
        for number in os.read(reader, 64):
            if number in _STOPPING and deadline is None:
                name = signal.Signals(number).name
                first, deadline = now, now + grace_s
            elif number in _STOPPING and now - first > _SAME_REQUEST_S:
                deadline = min(deadline or now, now + _GRACE_SECOND_SIGNAL_S)


class CpuWait:
    """Counts from its creation; reading it costs some microseconds per thread."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._before = self._delays_ns()

    def longest_s(self) -> float | None:
        """Return the longest wait of any thread, a lower bound of the time lost; None where it is not counted."""
        waits = [delay - self._before.get(thread, 0) for thread, delay in self._delays_ns().items()]
        return max(waits) / 1e9 if waits else None

    def _delays_ns(self) -> dict[str, int]:
        """Return the second number of each thread's ``schedstat`` (Linux, Documentation/scheduler/sched-stats.rst)."""
        delays: dict[str, int] = {}
        for file in self._tasks.glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
                delays[file.parent.name] = int(file.read_text(encoding="ascii").split()[1])
        return delays
