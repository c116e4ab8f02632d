"""Check the limits of a running job: time, stalls, disk space and heartbeats, on a monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from accelmark.results.store.files import free_mib
from accelmark.run.agent.rank_exit import Termination, read_log_end
from accelmark.run.agent.task import HEARTBEAT_FILE, Limits
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from accelmark.spec.number_format import duration

_EVENT: Final = PERFLOG_PREFIX.encode()


@final
@dataclass
class _Activity:
    """The last activity of a rank."""

    since: float
    num_bytes: int = 0
    """Size of its log; negative: of the launch's log, while the rank has none."""
    has_events: bool = False
    """Whether it has written an event; after the first, only events count as activity."""


@final
@dataclass
class LimitChecker:
    """Checks the limits of one job against the files in its node directory."""

    limits: Limits
    node_dir: Path
    ranks: range
    launcher_log: str
    started: float = field(default_factory=time.monotonic)
    _activities: dict[int, _Activity] = field(default_factory=dict)
    _heartbeat: int = 0
    _last_heartbeat: float = field(default_factory=time.monotonic)

    @property
    def interval_s(self) -> float:
        """Interval between checks: at most a second, and a quarter of the shortest limit."""
        shortest = min(filter(None, (self.limits.timeout_s, self.limits.stall_timeout_s, self.limits.abandon_s)))
        return min(1.0, shortest / 4)

    def check(self) -> Termination | None:
        """Return the end that an exceeded limit requires; None while all are kept."""
        now = time.monotonic()
        limits = self.limits
        stalled = self._stalled(now)
        if limits.timeout_s is not None and now - self.started > limits.timeout_s:
            return Termination("timed_out", "timed_out", f"exceeded its time limit of {limits.timeout_s:g} s")
        if stalled is not None:
            return stalled
        if limits.abandon_s is not None and self._heartbeat_age_s(now) > limits.abandon_s:
            return Termination("lost", "lost", f"no coordinator heartbeat for {duration(limits.abandon_s)}")
        for rank, activity in self._activities.items():
            if activity.num_bytes > limits.max_log_mib * 2**20:
                problem = f"the log of rank {rank} exceeds {limits.max_log_mib:g} MiB"
                return Termination("failed", "failed", f"{problem}: make it print less")
        free = free_mib(self.node_dir)
        if free < limits.min_free_mib:
            problem = f"{free:.1f} MiB are free on the disk of {self.node_dir}, {limits.min_free_mib:g} MiB are needed"
            return Termination("failed", "failed", f"{problem}: free space and resume the run")
        return None

    def _stalled(self, now: float) -> Termination | None:
        """Find ranks without events for too long; the first is named.

        Finished ranks write no more events, but once all have finished, their processes must end within that time.
        """
        launcher = size_of(self.node_dir / self.launcher_log)
        for rank in self.ranks:
            self._update(rank, launcher, now)
        limit_s = self.limits.stall_timeout_s
        silent = [rank for rank in self.ranks if now - self._activities[rank].since > limit_s]
        if not silent:
            return None
        unfinished = [rank for rank in silent if read_log_end(_log_of(self.node_dir, rank)).state is None]
        if not unfinished:
            who = f"rank {silent[0]}" if len(silent) == 1 else f"all of this host's {len(silent)} ranks"
            what = f"{who} finished, but a process did not end within {limit_s:g} s"
            return Termination("stalled", "timed_out", what) if len(silent) == len(self.ranks) else None
        first = min(unfinished, key=lambda rank: self._activities[rank].since)
        num_more = len(unfinished) - 1
        others = "" if not num_more else f", nor did {num_more} more of this host's {len(self.ranks)} ranks"
        what = "no event" if self._activities[first].has_events else "nothing"
        return Termination("stalled", "timed_out", f"rank {first} wrote {what} for {limit_s:g} s{others}")

    def silent_s(self) -> dict[int, float]:
        """Return the time since the last activity of each rank, in seconds."""
        now = time.monotonic()
        return {rank: now - activity.since for rank, activity in self._activities.items()}

    def _update(self, rank: int, launcher: int, now: float) -> None:
        """Record activity of a rank: events; any output before its first event; the launch's, until it has a log."""
        log = _log_of(self.node_dir, rank)
        known = self._activities.setdefault(rank, _Activity(now))
        num_bytes = size_of(log) or -launcher
        if num_bytes == known.num_bytes:
            return
        has_event = num_bytes > 0 and _has_event(log, max(0, known.num_bytes - len(_EVENT)))
        if has_event or not known.has_events:
            known.since = now
        known.num_bytes, known.has_events = num_bytes, known.has_events or has_event

    def _heartbeat_age_s(self, now: float) -> float:
        """Return the time since the heartbeat file changed; its timestamps are only compared, as clocks may jump."""
        try:
            stamp = (self.node_dir / HEARTBEAT_FILE).stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._heartbeat:
            self._heartbeat, self._last_heartbeat = stamp, now
        return now - self._last_heartbeat


def _has_event(log: Path, begin: int) -> bool:
    """Return whether a log has an event after its first ``begin`` bytes; a shorter log is read from its start."""
    try:
        with log.open("rb") as file:
            file.seek(begin if begin <= size_of(log) else 0)
            return _EVENT in file.read()
    except OSError:
        return False


def _log_of(node_dir: Path, rank: int) -> Path:
    return node_dir / f"rank{rank}.out.log"


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
