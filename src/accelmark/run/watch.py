"""The limits a job runs under: time, silence and disk space, judged on a clock that never steps back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from accelmark.results.files import free_mib
from accelmark.run.task import SEEN_FILE, Limits
from accelmark.run.wording import duration


@final
@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that was broken, and what to tell people."""

    kind: Literal["timed_out", "stalled", "disk_full", "abandoned"]
    reason: str


@final
@dataclass(slots=True)
class LimitWatch:
    """Looks at a job's directory now and then and says which limit it has broken."""

    limits: Limits
    node_dir: Path
    started: float = field(default_factory=time.monotonic)
    _bytes: int = -1
    _last_output: float = field(default_factory=time.monotonic)
    _seen_stamp: int = 0
    _last_seen: float = field(default_factory=time.monotonic)

    @property
    def interval_s(self) -> float:
        """How often looking is enough: no limit is overrun by more than a quarter, or a second."""
        shortest = min(filter(None, (self.limits.timeout_s, self.limits.stall_timeout_s, self.limits.abandon_s)))
        return min(1.0, shortest / 4)

    def look(self) -> Breach | None:
        """Return the first limit that is broken now."""
        now = time.monotonic()
        written = sum(size_of(path) for path in self.node_dir.glob("rank*.out.log"))
        written += sum(size_of(path) for path in self.node_dir.glob("start_*_task.log"))
        if written != self._bytes:
            self._bytes, self._last_output = written, now
        limits = self.limits
        if limits.timeout_s is not None and now - self.started > limits.timeout_s:
            return Breach("timed_out", f"took longer than its limit of {limits.timeout_s:g} s")
        if now - self._last_output > limits.stall_timeout_s:
            return Breach("stalled", f"no rank of this host wrote anything for {limits.stall_timeout_s:g} s")
        if limits.abandon_s is not None and self._unseen_s(now) > limits.abandon_s:
            return Breach("abandoned", f"no coordinator asked after it for {duration(limits.abandon_s)}")
        free = free_mib(self.node_dir)
        if free < limits.min_free_mib:
            what = f"only {free:.1f} MiB are free on the disk of {self.node_dir}, below {limits.min_free_mib:g} MiB"
            return Breach("disk_full", f"{what}: free some space and resume the run")
        return None

    def _unseen_s(self, now: float) -> float:
        """Return for how long no coordinator was seen; its stamps are compared, since the wall clock may jump."""
        try:
            stamp = (self.node_dir / SEEN_FILE).stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._seen_stamp:
            self._seen_stamp, self._last_seen = stamp, now
        return now - self._last_seen


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
