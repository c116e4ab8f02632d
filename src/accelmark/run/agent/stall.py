"""The limits of a running job, by a monotonic clock, and the state of the ranks of a stalled one on this host."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from accelmark.results.store.files import free_mib
from accelmark.run.agent.rank_exit import Termination, escaped_line, read_log_end, tail
from accelmark.run.agent.task import HEARTBEAT_FILE, Limits
from accelmark.run.onhost.program import kernel_messages
from accelmark.spec.backports import zip_strict
from accelmark.spec.job import LastCollective, LastCollectives, RankStall, StallRecord
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PERFLOG_PREFIX, decode_line
from accelmark.spec.number_format import duration
from accelmark.spec.plugins.framework import STACKS_SIGNAL, collectives_address

_PROC: Final = Path("/proc")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the workers of data loaders write there
_STACKS_TIMEOUT_S: Final = 3.0
_UNRESPONSIVE: Final = ("T", "t", "Z")
"""States of stopped processes and zombies."""
_EVENT: Final = PERFLOG_PREFIX.encode()
_FRAME: Final = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)
_TELLING: Final = re.compile(
    r"\bXid\b|out of memory|oom-kill|hung task|blocked for more than|no space|i/o error|not responding|soft lockup"
    r"|hardware error|\bmce\b|edac|ext4-fs error|xfs.*(error|shutdown)|link is down|segfault",
    re.IGNORECASE,
)
"""Messages of the kernel about devices, memory, disks and networks that stop a process."""


def diagnose(node_dir: Path, pids: Iterable[int], silent_s: Mapping[int, float], since_s: float) -> StallRecord:
    """Return the state of each rank of this host.

    Args:
        pids: the processes that the agent started.
        silent_s: rank -> time since its last event.
        since_s: the kernel's messages since this time of ``time.monotonic`` are read.
    """
    processes = _rank_processes(pids)
    stacks = _stacks(node_dir, processes)
    with ThreadPoolExecutor(len(processes) or 1) as pool:
        answers = pool.map(lambda process: _collectives(node_dir, *process), processes.items())
        collectives = dict(zip_strict(processes, answers))
    ranks = tuple(
        RankStall(
            rank=rank,
            pid=(pid := processes.get(rank)),
            process_state=_state(pid) if pid is not None else None,
            waits_in=_text(pid, "wchan").strip("0\n") or None if pid is not None else None,
            silent_s=silent,
            last_step=_last_step(rank_log(node_dir, rank)),
            has_finished=read_log_end(rank_log(node_dir, rank)).state is not None,
            stack=stacks.get(rank, ()),
            collectives=collectives.get(rank, ()),
        )
        for rank, silent in silent_s.items()
    )
    full = []
    for place in (_SHARED_MEMORY, Path(tempfile.gettempdir()), node_dir):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            if usage.free < 0.01 * usage.total:
                full.append(f"{place} is full ({usage.free / 2**20:.1f} of {usage.total / 2**20:.0f} MiB free)")
    messages, problem = kernel_messages(since_s, _TELLING)
    shown = tuple(map(escaped_line, messages[-20:]))
    return StallRecord(ranks=ranks, full_file_systems=tuple(full), kernel_messages=shown, kernel_problem=problem)


def _rank_processes(pids: Iterable[int]) -> dict[int, int]:
    """Return the process of each rank: the oldest with its number in the environment that answers, else the oldest."""
    by_rank: dict[int, list[int]] = {}
    stats = {pid: _text(pid, "stat").rpartition(")")[2].split() for pid in pids}
    for pid in sorted(stats, key=lambda pid: int(stats[pid][19]) if len(stats[pid]) > 19 else 0):  # by time of start
        rank = next((entry[5:] for entry in _text(pid, "environ").split("\0") if entry.startswith("RANK=")), "")
        if rank.isdigit():
            by_rank.setdefault(int(rank), []).append(pid)
    return {rank: next(filter(_writes_stacks, pids), pids[0]) for rank, pids in by_rank.items()}


def _stacks(node_dir: Path, processes: Mapping[int, int]) -> dict[int, tuple[str, ...]]:
    """Ask the ranks for their threads' stacks, which they write to their logs; return the main threads' stacks."""
    sizes: dict[int, int] = {}
    for rank, pid in processes.items():
        if _state(pid) not in _UNRESPONSIVE and _writes_stacks(pid):
            with contextlib.suppress(OSError):
                sizes[rank] = rank_log(node_dir, rank).stat().st_size
                os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_TIMEOUT_S
    stacks: dict[int, tuple[str, ...]] = {}
    written = dict.fromkeys(sizes, "")
    while sizes.keys() - stacks.keys() and time.monotonic() < deadline:
        time.sleep(0.1)
        for rank in sizes.keys() - stacks.keys():
            with contextlib.suppress(OSError), rank_log(node_dir, rank).open("rb") as log:
                log.seek(sizes[rank])
                text = log.read().decode(errors="backslashreplace")
                if text and text == written[rank]:  # complete: it no longer grows
                    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]  # the last thread
                    frames = [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in _FRAME.finditer(main)]
                    stacks[rank] = tuple(map(escaped_line, frames[:30]))
                written[rank] = text
    return stacks


def _collectives(node_dir: Path, rank: int, pid: int) -> tuple[LastCollective, ...]:
    """Return the last collectives of a rank; empty where it records none, or does not answer."""
    if _state(pid) in _UNRESPONSIVE:
        return ()
    with contextlib.suppress(OSError, ValidationError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_STACKS_TIMEOUT_S)
        connection.connect(collectives_address(node_dir, rank))
        with connection.makefile("rb") as answer:
            return LastCollectives.model_validate_json(answer.read()).collectives
    return ()


def _writes_stacks(pid: int) -> bool:
    """Return whether a process handles the signal for stacks; any other would be ended by it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _text(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _last_step(log: Path) -> int | None:
    events = (event for line in reversed(tail(log)) for event in decode_line(line) if event.event == Event.STEP_END)
    steps = (event.value.get("global_steps") for event in events)
    return next((step for step in steps if isinstance(step, int)), None)


def _state(pid: int) -> str | None:
    return next(iter(_text(pid, "stat").rpartition(")")[2].split()), None)


def _text(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / name).read_text(errors="replace")
    return ""


def rank_log(node_dir: Path, rank: int) -> Path:
    """Return the log of a rank."""
    return node_dir / f"rank{rank}.out.log"


@dataclass
class _Activity:
    since: float
    num_bytes: int = 0
    """Size of its log; negative: of the launch's log, while the rank has none."""
    has_events: bool = False
    """Whether it has written an event; after the first, only events count as activity."""


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
        if limits.abandon_s is not None:
            stamp = 0  # is only compared, as clocks may jump
            with contextlib.suppress(OSError):
                stamp = (self.node_dir / HEARTBEAT_FILE).stat().st_mtime_ns
            if stamp != self._heartbeat:
                self._heartbeat, self._last_heartbeat = stamp, now
            if now - self._last_heartbeat > limits.abandon_s:
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
        unfinished = [rank for rank in silent if read_log_end(rank_log(self.node_dir, rank)).state is None]
        if not unfinished:
            who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"all of this host's {len(self.ranks)} ranks"
            what = f"{who} finished, but a process did not end within {limit_s:g} s"
            return Termination("stalled", "timed_out", what) if len(silent) == len(self.ranks) else None
        first = min(unfinished, key=lambda rank: self._activities[rank].since)
        num_more = len(unfinished) - 1
        others = f", nor did {num_more} more of this host's {len(self.ranks)} ranks" if num_more else ""
        what = "no event" if self._activities[first].has_events else "nothing"
        return Termination("stalled", "timed_out", f"rank {first} wrote {what} for {limit_s:g} s{others}")

    def silent_s(self) -> dict[int, float]:
        """Return the time since the last activity of each rank, in seconds."""
        now = time.monotonic()
        return {rank: now - activity.since for rank, activity in self._activities.items()}

    def _update(self, rank: int, launcher: int, now: float) -> None:
        """Record activity of a rank: events; any output before its first event; the launch's, until it has a log."""
        log = rank_log(self.node_dir, rank)
        known = self._activities.setdefault(rank, _Activity(now))
        num_bytes = size_of(log) or -launcher
        if num_bytes == known.num_bytes:
            return
        has_event = False
        if num_bytes > 0:
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(max(0, known.num_bytes - len(_EVENT)) if known.num_bytes < num_bytes else 0)
                has_event = _EVENT in file.read()
        if has_event or not known.has_events:
            known.since = now
        known.num_bytes, known.has_events = num_bytes, known.has_events or has_event


def size_of(path: Path) -> int:
    """Return the size of a file, 0 where it is missing."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
