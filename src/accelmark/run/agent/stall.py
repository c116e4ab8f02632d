"""The state of the ranks of a stalled job: processes, stacks, last steps, and the kernel's messages on this host."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from accelmark.run.agent.rank_exit import escaped_line, read_log_end, tail
from accelmark.run.onhost.checks import kernel_messages
from accelmark.spec.backports import zip_strict
from accelmark.spec.job import LastCollective, LastCollectives, RankStall, StallRecord
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import decode_line
from accelmark.spec.plugins.framework import STACKS_SIGNAL, collectives_address

_PROC: Final = Path("/proc")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the workers of data loaders write there
_LEAST_FREE: Final = 0.01
_STACKS_TIMEOUT_S: Final = 3.0
_MAX_FRAMES: Final = 30
_MAX_MESSAGES: Final = 20
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD: Final = re.compile(r"^(Current thread|Thread) 0x")
_TELLING: Final = re.compile(
    r"\bXid\b|out of memory|oom-kill|hung task|blocked for more than|no space|i/o error|not responding|soft lockup"
    r"|hardware error|\bmce\b|edac|ext4-fs error|xfs.*(error|shutdown)|link is down|segfault",
    re.IGNORECASE,
)
"""Messages of the kernel about devices, memory, disks and networks that stop a process."""


def diagnose(node_dir: Path, pids: Iterable[int], silent_s: Mapping[int, float], since_s: float) -> StallRecord:
    """Return the state of each rank of this host.

    Args:
        node_dir: the directory with the ranks' logs.
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
            last_step=_last_step(_log(node_dir, rank)),
            has_finished=read_log_end(_log(node_dir, rank)).state is not None,
            stack=stacks.get(rank, ()),
            collectives=collectives.get(rank, ()),
            children=tuple(_stuck_children(pid)) if pid is not None else (),
        )
        for rank, silent in silent_s.items()
    )
    messages, problem = kernel_messages(since_s, _TELLING)
    shown = tuple(map(escaped_line, messages[-_MAX_MESSAGES:]))
    full = tuple(filter(None, map(_fullness, (_SHARED_MEMORY, Path(tempfile.gettempdir()), node_dir))))
    return StallRecord(ranks=ranks, full_file_systems=full, kernel_messages=shown, kernel_problem=problem)


def _fullness(place: Path) -> str | None:
    """Return a message where less than 1 % of a file system is free; None where there is space, or no such place."""
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    if usage.free >= _LEAST_FREE * usage.total:
        return None
    return f"{place} is full ({usage.free / 2**20:.1f} of {usage.total / 2**20:.0f} MiB free)"


def _rank_processes(pids: Iterable[int]) -> dict[int, int]:
    """Return the process of each rank: the oldest with its number in the environment that answers, else the oldest."""
    by_rank: dict[int, list[int]] = {}
    for pid in sorted(pids, key=_age):
        rank = next((entry[5:] for entry in _text(pid, "environ").split("\0") if entry.startswith("RANK=")), "")
        if rank.isdigit():
            by_rank.setdefault(int(rank), []).append(pid)
    return {rank: next(filter(_writes_stacks, pids), pids[0]) for rank, pids in by_rank.items()}


def _stacks(node_dir: Path, processes: Mapping[int, int]) -> dict[int, tuple[str, ...]]:
    """Ask the ranks for their threads' stacks, which they write to their logs; return the main threads' stacks."""
    sizes: dict[int, int] = {}
    for rank, pid in processes.items():
        if _state(pid) not in ("T", "t", "Z") and _writes_stacks(pid):
            with contextlib.suppress(OSError):
                sizes[rank] = _log(node_dir, rank).stat().st_size
                os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_TIMEOUT_S
    stacks: dict[int, tuple[str, ...]] = {}
    written = dict.fromkeys(sizes, "")
    while sizes.keys() - stacks.keys() and time.monotonic() < deadline:
        time.sleep(0.1)
        for rank in sizes.keys() - stacks.keys():
            with contextlib.suppress(OSError), _log(node_dir, rank).open("rb") as log:
                log.seek(sizes[rank])
                text = log.read().decode(errors="backslashreplace")
                if text and text == written[rank]:  # complete: it no longer grows
                    stacks[rank] = main_stack(text)
                written[rank] = text
    return stacks


def _collectives(node_dir: Path, rank: int, pid: int) -> tuple[LastCollective, ...]:
    """Return the last collectives of a rank; empty where it records none, or does not answer."""
    if _state(pid) in ("T", "t", "Z"):
        return ()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_STACKS_TIMEOUT_S)
            connection.connect(collectives_address(node_dir, rank))
            with connection.makefile("rb") as answer:
                return LastCollectives.model_validate_json(answer.read()).collectives
    except (OSError, ValidationError):
        return ()


def main_stack(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread, innermost first: the last thread in the text of faulthandler."""
    frames: list[str] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif (frame := _FRAME.match(line)) is not None:
            frames.append(escaped_line(f"{frame['file']}:{frame['line']} in {frame['function']}"))
    return tuple(frames[:_MAX_FRAMES])


def _writes_stacks(pid: int) -> bool:
    """Whether a process handles the signal for stacks; any other would be ended by it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _text(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _last_step(log: Path) -> int | None:
    for line in reversed(tail(log)):
        for event in decode_line(line):
            if event.event == Event.STEP_END and isinstance(step := event.value.get("global_steps"), int):
                return step
    return None


def _stuck_children(pid: int) -> Iterator[str]:
    """Yield the threads and children of a process that are stopped, or wait in the kernel without a time limit."""
    for task in sorted((_PROC / str(pid) / "task").glob("*")):
        for child in (task / "children").read_text().split() if (task / "children").exists() else ():
            if (state := _state(int(child))) in ("T", "t", "D", "Z"):
                name, place = _text(int(child), "comm").strip(), _text(int(child), "wchan").strip("0\n")
                yield escaped_line(f"process {child} ({name}): state {state}" + (f" in {place}" if place else ""))
        if task.name != str(pid) and (state := _state(pid, task.name)) == "D":
            yield f"thread {task.name}: state D"


def _state(pid: int, thread: str | None = None) -> str | None:
    place = f"task/{thread}/stat" if thread is not None else "stat"
    fields = _text(pid, place).rpartition(")")[2].split()
    return fields[0] if fields else None


def _age(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 where there is none."""
    fields = _text(pid, "stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def _text(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def _log(node_dir: Path, rank: int) -> Path:
    return node_dir / f"rank{rank}.out.log"
