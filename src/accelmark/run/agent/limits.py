"""The limits a job runs under: time, silence and disk space, judged on a clock that never steps back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, final

from accelmark.results.store.files import free_mib
from accelmark.run.agent.rank_exit import read_log_end
from accelmark.run.agent.task import SEEN_FILE, Limits
from accelmark.spec.number_format import duration
from accelmark.spec.perflog import PERFLOG_PREFIX

_EVENT: Final = PERFLOG_PREFIX.encode()


@final
@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that was broken, and what to tell people."""

    kind: Literal["timed_out", "stalled", "disk_full", "abandoned"]
    reason: str


@final
@dataclass(slots=True)
class _Silence:
    """Since when a rank has given no sign of life."""

    since: float
    num_bytes: int = 0
    """Of its log; below zero those of the launcher's, while it has none of its own."""
    has_events: bool = False
    """Whether it ever wrote an event; from then on nothing else counts."""


@final
@dataclass(slots=True)
class LimitWatch:
    """Looks at a job's directory now and then and says which limit it has broken."""

    limits: Limits
    node_dir: Path
    ranks: range
    launcher_log: str
    started: float = field(default_factory=time.monotonic)
    _silences: dict[int, _Silence] = field(default_factory=dict)
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
        limits = self.limits
        stalled = self._stalled(now)
        if limits.timeout_s is not None and now - self.started > limits.timeout_s:
            return Breach("timed_out", f"took longer than its limit of {limits.timeout_s:g} s")
        if stalled is not None:
            return stalled
        if limits.abandon_s is not None and self._unseen_s(now) > limits.abandon_s:
            return Breach("abandoned", f"no coordinator asked after it for {duration(limits.abandon_s)}")
        free = free_mib(self.node_dir)
        if free < limits.min_free_mib:
            what = f"only {free:.1f} MiB are free on the disk of {self.node_dir}, below {limits.min_free_mib:g} MiB"
            return Breach("disk_full", f"{what}: free some space and resume the run")
        return None

    def _stalled(self, now: float) -> Breach | None:
        """Find ranks that wrote no event for too long; the first to fall silent is named.

        A rank that has finished is done with events, but where all have, their processes have to end in that time too.
        """
        launcher = size_of(self.node_dir / self.launcher_log)
        for rank in self.ranks:
            self._hear(rank, launcher, now)
        limit_s = self.limits.stall_timeout_s
        silent = [rank for rank in self.ranks if now - self._silences[rank].since > limit_s]
        if not silent:
            return None
        unfinished = [rank for rank in silent if read_log_end(_log_of(self.node_dir, rank)).finished is None]
        if not unfinished:
            return self._hanging(silent)
        first = min(unfinished, key=lambda rank: self._silences[rank].since)
        num_more = len(unfinished) - 1
        others = "" if not num_more else f", nor did {num_more} more of this host's {len(self.ranks)} ranks"
        what = "no event" if self._silences[first].has_events else "nothing"
        return Breach("stalled", f"rank {first} wrote {what} for {limit_s:g} s{others}")

    def _hanging(self, finished: list[int]) -> Breach | None:
        if len(finished) < len(self.ranks):
            return None
        who = f"rank {finished[0]}" if len(finished) == 1 else f"all of this host's {len(finished)} ranks"
        limit_s = self.limits.stall_timeout_s
        return Breach("stalled", f"{who} finished, but a process did not end within {limit_s:g} s after it")

    def _hear(self, rank: int, launcher: int, now: float) -> None:
        """Note whether a rank has given a sign of life: an event, and until its first anything that it writes.

        Until a rank has begun its log, what the launcher says counts.
        """
        log = _log_of(self.node_dir, rank)
        known = self._silences.setdefault(rank, _Silence(now))
        num_bytes = size_of(log) or -launcher
        if num_bytes == known.num_bytes:
            return
        has_event = num_bytes > 0 and _has_event(log, max(0, known.num_bytes - len(_EVENT)))
        if has_event or not known.has_events:
            known.since = now
        known.num_bytes, known.has_events = num_bytes, known.has_events or has_event

    def _unseen_s(self, now: float) -> float:
        """Return for how long no coordinator was seen; its stamps are compared, since the wall clock may jump."""
        try:
            stamp = (self.node_dir / SEEN_FILE).stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._seen_stamp:
            self._seen_stamp, self._last_seen = stamp, now
        return now - self._last_seen


def _has_event(log: Path, begin: int) -> bool:
    """Whether there is an event in a log behind so many bytes, or anywhere where the log is shorter than that."""
    try:
        with log.open("rb") as file:
            file.seek(begin if begin <= size_of(log) else 0)
            return _EVENT in file.read()
    except OSError:
        return False


def _log_of(node_dir: Path, rank: int) -> Path:
    return node_dir / f"rank{rank}.out.log"


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
