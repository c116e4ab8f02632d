"""Event loop whose timers have a resolution of microseconds and that says when data were ready."""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from typing import Final, final

_SPARE_FILES: Final = 64
"""Descriptors beside the connections."""


@final
class WakeSelector(selectors.EpollSelector):
    """epoll that waits to the microsecond and notes when it returned.

    ``epoll_wait`` rounds to milliseconds, so timers would be up to 1 ms late. ``select(2)`` on the descriptor of epoll
    itself does not. Data that were ready when it returned have ``woke_ns`` as their arrival, however many connections
    the loop handles before theirs.
    """

    woke_ns: int = 0
    """``time.monotonic_ns`` when the latest call returned."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait up to ``timeout`` seconds (None: without limit) for ready files."""
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            select.select((self.fileno(),), (), (), timeout)
            ready = super().select(0)
        self.woke_ns = time.monotonic_ns()
        return ready


def new_loop(selector: WakeSelector) -> asyncio.AbstractEventLoop:
    """Return an event loop on ``selector``."""
    return asyncio.SelectorEventLoop(selector)


def allow_files() -> int:
    """Raise the limit of open files to the one allowed; return the number of connections that fit."""
    import resource  # missing on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - _SPARE_FILES
