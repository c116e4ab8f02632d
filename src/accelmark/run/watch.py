"""The limits a job runs under: time, silence and disk space, judged on a clock that never steps back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from accelmark.results.files import free_mib
from accelmark.run.ranklog import last_words
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
class _Silence:
    """How long a rank's log has been as it is."""

    num_bytes: int
    since: float


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
        """Find ranks that wrote nothing for too long and have not finished; the first to fall silent is named.

        Until a rank has begun its log, what the launcher says counts as its sign of life.
        """
        launcher = size_of(self.node_dir / self.launcher_log)
        for rank in self.ranks:
            num_bytes = size_of(_log_of(self.node_dir, rank)) or -launcher
            known = self._silences.get(rank)
            if known is None or known.num_bytes != num_bytes:
                self._silences[rank] = _Silence(num_bytes, now)
        limit_s = self.limits.stall_timeout_s
        silent = [rank for rank in self.ranks if now - self._silences[rank].since > limit_s]
        silent = [rank for rank in silent if last_words(_log_of(self.node_dir, rank)).finished is None]
        if not silent:
            return None
        first = min(silent, key=lambda rank: self._silences[rank].since)
        others = "" if len(silent) == 1 else f", nor did {len(silent) - 1} more of this host's {len(self.ranks)} ranks"
        return Breach("stalled", f"rank {first} wrote nothing for {limit_s:g} s{others}")

    def _unseen_s(self, now: float) -> float:
        """Return for how long no coordinator was seen; its stamps are compared, since the wall clock may jump."""
        try:
            stamp = (self.node_dir / SEEN_FILE).stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._seen_stamp:
            self._seen_stamp, self._last_seen = stamp, now
        return now - self._last_seen


def _log_of(node_dir: Path, rank: int) -> Path:
    return node_dir / f"rank{rank}.out.log"


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
