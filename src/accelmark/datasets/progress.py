"""How long operations tell of their progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

Progress = Callable[[str, int, int | None], None]
"""Told what is going on, the bytes done, and the bytes in all (None: not known)."""

INTERVAL_S: Final = 0.1


@final
class Meter:
    """Adds up bytes and passes them on ten times a second, and once at the end."""

    def __init__(self, what: str, total: int | None, progress: Progress | None) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done, self._told_s = 0, 0.0

    def add(self, amount: int) -> None:
        """Count ``amount`` bytes more."""
        self.set(self._done + amount)

    def set(self, done: int) -> None:
        """Set the bytes done; never more than there are in all is passed on."""
        self._done = done
        done = done if self._total is None else min(done, self._total)
        now_s = time.monotonic()
        if self._progress is not None and (done == self._total or now_s - self._told_s >= INTERVAL_S):
            self._told_s = now_s
            self._progress(self._what, done, self._total)
