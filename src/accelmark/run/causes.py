"""The table of causes that end ranks, node agents and preparations: how each is recognised, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_ELSEWHERE: Final = "choose another directory (--out; work_directory in the cluster file for hosts reached by SSH)"
_ENDED_STEP: Final = "Slurm or a user ended the step: see 'sacct' or 'scontrol show job'"
CAUSES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (r"no space left on device|disk quota exceeded", f"the disk is full: free space there, or {_ELSEWHERE}"),
        (r"read-only file system", f"mount it writable, or {_ELSEWHERE}"),
        (
            r"out of memory: killed|oom-kill|\boom_kill|memory cgroup out of memory|cannot allocate memory|bad_alloc",
            "host memory or its limit is used up: reduce batch_size or loader.num_workers, or raise the limit",
        ),
        (
            r"\bSIGBUS\b|bus error",
            "shared memory or the disk under a mapped file is full: enlarge it (in a container by container.shm_size)",
        ),
        (r"\brequeued\b", "Slurm starts it again; later rounds wait for it"),
        (r"\*\*\* (step|job) .* cancelled|\bsrun: was killed", _ENDED_STEP),
        (r"\bsrun: (error|force)", _ENDED_STEP),
        (r"\bSIGKILL\b", "often the kernel's out-of-memory killer: see dmesg; or a user, or its container was removed"),
        (r"\bSIGSEGV\b", "a fault in native code: see the last lines for its stack"),
        (r"\bSIGABRT\b", "an abort in native code: see the last lines for its message"),
        (r"\bSIGXFSZ\b", "a file grew beyond the limit for files"),
    )
)
"""What a message of the system contains -> what to do; the first row that matches counts."""
NUM_MESSAGES: Final = 7
"""The first rows are causes in any line of a log; the others are ends of a process."""


def explained(reason: str) -> str:
    """Return a reason with what to do about its cause, where the table has it."""
    advice = advice_for(reason)
    return f"{reason} ({advice})" if advice is not None and advice not in reason else reason


def advice_for(reason: str) -> str | None:
    """Return what to do about the cause that a reason names; None where the table has none."""
    return next((advice for pattern, advice in CAUSES if pattern.search(reason)), None)


def cause_among(lines: Iterable[str]) -> str | None:
    """Return the first of ``lines`` that names a cause, by the order of the table; None where none does."""
    candidates = [line.strip() for line in lines]
    causes = (line for pattern, _ in CAUSES[:NUM_MESSAGES] for line in candidates if pattern.search(line))
    return next(causes, None)
