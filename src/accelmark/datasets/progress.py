"""Progress reports of downloads and hashing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

Progress = Callable[[str, int, int | None], None]
"""Called with the activity, the bytes done, and the total bytes (None: unknown)."""

INTERVAL_S: Final = 0.1


@final
class ProgressMeter:
    """Counts bytes and reports them ten times a second, and at the end."""

    def __init__(self, what: str, total: int | None, progress: Progress | None) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done, self._reported_s = 0, 0.0

    def add(self, amount: int) -> None:
        """Add ``amount`` bytes."""
        self.set(self._done + amount)

    def set(self, done: int) -> None:
        """Set the bytes done; no more than the total is reported."""
        self._done = done
        done = done if self._total is None else min(done, self._total)
        now_s = time.monotonic()
        if self._progress is not None and (done == self._total or now_s - self._reported_s >= INTERVAL_S):
            self._reported_s = now_s
            self._progress(self._what, done, self._total)
