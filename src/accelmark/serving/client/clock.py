"""Event loop whose timers have a resolution of microseconds and that knows when data were ready."""

from __future__ import annotations

import math
import select
import selectors
import time
from collections.abc import Callable
from typing import Final, final

_AWAKE_S: Final = 0.0003
"""Time before a timer is due from which the process waits without sleeping: longer than most wake-ups take."""


@final
class WakeSelector(selectors.EpollSelector):
    """epoll that waits to the microsecond, notes when it returned, and calls the readers of streams itself.

    ``epoll_wait`` rounds to milliseconds, so timers would be up to 1 ms late. ``select(2)`` on the descriptor of epoll
    itself does not, but a process that sleeps is woken late: by the kernel's timer slack (50 µs), and by what an idle
    processor takes to go on, 0.1 to 0.2 ms in a virtual machine. So the last part of a wait for a timer is active.
    Data that were ready when it returned have ``woke_ns`` as their arrival, however many connections are read before
    theirs. Data that woke the process from sleep arrived earlier; the kernel knows when (``has_slept``). Streams have
    an epoll of their own, whose readers are called without a turn of the event loop for each, which would take as long
    as reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.woke_ns = 0
        """``time.monotonic_ns`` when the latest call returned."""
        self.has_slept = False
        """Whether the latest call slept until data or another process woke it."""
        self._streams = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, read: Callable[[], None]) -> None:
        """Call ``read`` whenever a stream has data."""
        self._readers[descriptor] = read
        self._streams.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop; a stream that is not watched is ignored."""
        if self._readers.pop(descriptor, None) is not None:
            self._streams.unregister(descriptor)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait up to ``timeout`` seconds (None: without limit) for ready files; read the streams among them."""
        ready, streams = super().select(0), self._streams.poll(0)
        self.has_slept = False
        if not ready and not streams and (timeout is None or timeout > 0):
            until_s = math.inf if timeout is None else time.monotonic() + timeout
            asleep_s = None if timeout is None else timeout - _AWAKE_S
            if asleep_s is None or asleep_s > 0:
                select.select((self.fileno(), self._streams.fileno()), (), (), asleep_s)
                ready, streams = super().select(0), self._streams.poll(0)
                self.has_slept = bool(ready or streams)
            while not ready and not streams and time.monotonic() < until_s:
                ready, streams = super().select(0), self._streams.poll(0)
        self.woke_ns = time.monotonic_ns()
        readers = self._readers
        for descriptor, _ in streams:
            if (read := readers.get(descriptor)) is not None:  # a reader before it may have closed it
                read()
        return ready

    def close(self) -> None:
        """Close both."""
        self._streams.close()
        super().close()


def allow_files() -> None:
    """Raise the limit of open files, each connection being one, to the one allowed."""
    import resource  # missing on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
