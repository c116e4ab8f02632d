"""Classify how ranks, nodes and jobs ended, from exit codes and the ends of logs, with the table of causes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from accelmark.spec.job import NodeExit, RankExit, RankState
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PERFLOG_PREFIX, decode_line
from accelmark.spec.plugins.framework import LaunchRecord
from accelmark.spec.secret import without_userinfo

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
        (r"\bsrun: (error|force)", _ENDED_STEP),  # it often follows the line above
        (r"\bSIGKILL\b", "often the kernel's out-of-memory killer: see dmesg; or a user, or its container was removed"),
        (r"\bSIGSEGV\b", "a fault in native code: see the last lines for its stack"),
        (r"\bSIGABRT\b", "an abort in native code: see the last lines for its message"),
        (r"\bSIGXFSZ\b", "a file grew beyond the limit for files"),
    )
)
"""What a message of the system contains -> what to do; the first row that matches counts."""
_NUM_MESSAGES: Final = 7
"""The first rows are causes in any line of a log; the others are ends of a process."""


NodeState = Literal["succeeded", "failed", "timed_out", "lost", "cancelled"]
_LAST_LINES: Final = 20
_TAIL_BYTES: Final = 256 * 1024
_MAX_LINE_LENGTH: Final = 500
_CAUSE: Final = re.compile(
    r"(?:\[rank\d+\]:\s*)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Fault)(?::.*)?$"
    r"|(?:Fatal Python error|terminate called|Segmentation fault|Killed)\b"
    r"|(?:.*/)?python[\w.]*: (?:Error while finding module specification for |No module named |can't open file )."
)
"""An exception, a fatal error, or Python's message where the script or module does not exist."""
_FAULT: Final = "Fatal Python error"
"""Begins the line of Python's fault handler, which has no more than the signal."""
_COMPILER_ERROR: Final = re.compile(r"^\S+:\d+(:\d+)?: (fatal )?error:|^CMake Error")
_ERROR: Final = re.compile(r"\berror\b|\bE:|cannot|not found|no such file", re.IGNORECASE)
_GENERIC: Final = re.compile(
    r"subprocess-exited-with-error|exited with (error|status|code)|note: This (error|is an issue)|metadata-generation"
    r"|Failed to build|command .* failed with exit",
    re.IGNORECASE,
)
_MAX_ERROR_LENGTH: Final = 300
_CONNECTION_ERRORS: Final = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout")
"""Errors of any framework that ranks raise after another rank has died."""
_CAUSES: Final[tuple[RankState, ...]] = (
    "signaled", "failed", "lost", "stalled", "timed_out", "cancelled", "succeeded",
)  # fmt: skip
_NODE_CAUSES: Final[tuple[NodeState, ...]] = ("failed", "lost", "timed_out", "cancelled", "succeeded")
"""States of ranks and nodes, from the most to the least likely first cause of a job's failure."""


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
    causes = (line for pattern, _ in CAUSES[:_NUM_MESSAGES] for line in candidates if pattern.search(line))
    return next(causes, None)


class LogEnd(NamedTuple):
    """The end of a rank's log."""

    lines: tuple[str, ...]
    state: str | None
    """The state in ``FINISHED``, where that is the last event."""
    cause: str | None
    """One line: the message of the last event, the exception, or None."""
    step: str | None = None
    """The step of inference that did not end, and its engine or framework."""


class Termination(NamedTuple):
    """Why the node agent terminated the ranks."""

    rank_state: Literal["timed_out", "stalled", "cancelled", "failed", "lost"]
    node_state: NodeState
    reason: str


def escaped_line(text: str) -> str:
    r"""Return ``text`` with characters that a terminal or a JSON reader cannot show written as ``\xNN``."""
    shown = "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= _MAX_LINE_LENGTH else f"{shown[:_MAX_LINE_LENGTH]} …"


def tail(path: Path) -> list[str]:
    r"""Return the last lines of a file, undecodable bytes written as ``\xNN``; empty where there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode("utf-8", errors="backslashreplace").split("\n")
    return lines[1:] if size > _TAIL_BYTES else lines


def read_log_end(path: Path) -> LogEnd:
    """Read the end of a rank's log."""
    lines = tail(path)
    finished: Mapping[str, Any] | None = None
    error: str | None = None
    step: str | None = None
    for event in chain.from_iterable(map(decode_line, lines)):
        # A resumed rank appends to the log: FINISHED of the earlier process does not count.
        finished = event.value if event.event == Event.FINISHED else None
        if event.event == Event.ERROR:
            error = _message(event.value) or error
        if event.event == Event.STAGE_BEGIN:
            engine = f", {event.value['engine']}" if event.value.get("engine") else ""
            step = escaped_line(f"step {event.value.get('number')} ({event.value.get('step')}{engine})")
        elif event.event == Event.STAGE_END:
            step = None
    other = [line for line in lines if line.strip() and PERFLOG_PREFIX not in line]
    state = str(finished.get("state", "completed")) if finished is not None else None
    own = _message(finished) if finished is not None and state != "completed" else None
    cause = own or error or next((line.strip() for line in reversed(other) if _CAUSE.match(line)), None)
    shown = [line for line in lines if line.strip()][-_LAST_LINES:]
    return LogEnd(tuple(map(escaped_line, shown)), state, escaped_line(cause) if cause else None, step)


def _message(value: Mapping[str, Any]) -> str | None:
    message = value.get("message") or value.get("reason")
    return " ".join(str(message).split()) if message else None


def error_lines(text: str) -> str:
    """Return the line of ``text`` with a known cause; else the first errors, preferably a compiler's; else its end."""
    lines = [line.strip(" \t│╰─>×") for line in text.splitlines() if line.strip()]
    if (cause := cause_among(lines)) is not None:
        return explained(without_userinfo(cause)[:_MAX_ERROR_LENGTH])
    named = [line for line in lines if _COMPILER_ERROR.search(line)]
    named = named or [line for line in lines if _ERROR.search(line) and not _GENERIC.search(line)]
    named = named or lines[-1:]
    return "; ".join(without_userinfo(line)[:_MAX_ERROR_LENGTH] for line in dict.fromkeys(named[:3]))


def signal_name(exit_code: int) -> str | None:
    """Return the name of the signal behind an exit code, as Python (-9) or a shell (137) reports it."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return signal.Signals(number).name if number > 0 else None
    except ValueError:
        return None


def classify_ranks(
    logs: Mapping[int, LogEnd],
    exit_code: int | None,
    record: LaunchRecord | None,
    termination: Termination | None,
    connection_errors: Sequence[str] = (),
) -> tuple[RankExit, ...]:
    """Return how each rank of a host ended.

    Args:
        logs: global rank -> the end of its log, in order.
        exit_code: of the launch process; None where it was not started.
        record: exit codes of the ranks, where the launch wrote them; else ``exit_code`` counts for each rank.
        termination: why the agent terminated the ranks, if it did.
        connection_errors: the framework's errors after another rank has ended.
    """
    exits = []
    for local_rank, (rank, log) in enumerate(logs.items()):
        code = record.exit_codes.get(rank) if record is not None else exit_code
        end = classify_rank(rank, local_rank, code, log, termination, connection_errors)
        if record is not None and termination is None and end.state != "succeeded":
            if record.problem is not None:
                end = end.model_copy(update={"state": "failed", "reason": record.problem})
            elif record.signal is not None and end.state in ("lost", "signaled"):
                reason = f"the launcher received {record.signal}, and rank {rank} did not end in time"
                end = end.model_copy(update={"state": "cancelled", "reason": reason})
        exits.append(end)
    return tuple(exits) if termination is not None else _victims_cancelled(exits)


def classify_rank(
    rank: int,
    local_rank: int,
    exit_code: int | None,
    log: LogEnd,
    termination: Termination | None,
    connection_errors: Sequence[str] = (),
) -> RankExit:
    """Return how one rank ended; ``exit_code`` is None where it is unknown.

    Success requires a FINISHED event that reports it, and no exit code other than 0.
    """
    name = signal_name(exit_code) if exit_code is not None else None
    during = f" in {log.step}" if log.step else ""
    state: RankState
    reason: str | None
    if log.state == "completed" and exit_code in (0, None):
        state, reason = "succeeded", None
    elif termination is not None:
        state, reason = termination.rank_state, termination.reason
    elif log.state == "cancelled":
        state, reason = "cancelled", log.cause or "was cancelled"
    elif name is not None and log.state is None:
        has_cause = log.cause is not None and not log.cause.startswith(_FAULT)
        state, reason = "signaled", f"killed by {name}{during}" + (f": {log.cause}" if has_cause else "")
    elif exit_code == 0 and log.state is None:
        state, reason = "failed", log.cause or f"exited with code 0 without a FINISHED event{during}"
    elif exit_code is None and log.state is None:
        state, reason = "lost", log.cause or f"ended without an exit code or a FINISHED event{during}"
    else:
        code = "an unknown code" if exit_code is None else f"code {exit_code}"
        state, reason = "failed", log.cause or f"exited with {code}{during}"
    errors, said = (*_CONNECTION_ERRORS, *connection_errors), (reason or "").lower()
    return RankExit(
        rank=rank,
        local_rank=local_rank,
        state=state,
        exit_code=exit_code,
        signal=name,
        reason=None if reason is None else explained(reason),
        lost_connection=state == "failed" and any(error in said for error in errors),
        last_lines=() if state == "succeeded" else log.lines,
    )


def _victims_cancelled(exits: Sequence[RankExit]) -> tuple[RankExit, ...]:
    """Mark ranks as cancelled that the launcher terminated, or that lost their connection, after another failed."""
    culprits = [item for item in exits if item.state == "signaled" and item.signal != "SIGTERM"]
    culprits = culprits or [item for item in exits if item.state == "failed"]
    if not culprits:
        return tuple(exits)
    reason = f"ended because rank {culprits[0].rank} did ({culprits[0].reason})"
    cancelled = {"state": "cancelled", "reason": reason}
    own = [item for item in exits if item.state == "signaled" and item.signal not in ("SIGTERM", "SIGKILL")]
    kept = [*culprits, *own, *(item for item in exits if item.state == "succeeded")]
    return tuple(item if item in kept else item.model_copy(update=cancelled) for item in exits)


def first_cause(ranks: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the other failures: it failed first, by itself."""
    return min((rank for rank in ranks if rank.state != "succeeded"), key=_priority, default=None)


def _priority(rank: RankExit) -> tuple[int, int]:
    """Priority as the first cause: foreign signal, error, other ends; termination and a lost connection come last."""
    lost_connection = rank.state == "failed" and rank.lost_connection
    terminated = rank.state == "signaled" and rank.signal == "SIGTERM"
    return (len(_CAUSES) if lost_connection or terminated else _CAUSES.index(rank.state)), rank.rank


def classify_node(ranks: Sequence[RankExit], termination: Termination | None) -> tuple[NodeState, str | None]:
    """Return the state of a node and the reason."""
    cause = first_cause(ranks)
    if cause is None and ranks:
        return "succeeded", None
    if termination is not None:
        return termination.node_state, termination.reason
    if cause is None:
        return "failed", "no rank was started"
    reason = cause.reason or cause.state
    if not reason.startswith(f"rank {cause.rank}"):
        reason = f"rank {cause.rank}: {reason}"
    return ("cancelled" if cause.state == "cancelled" else "failed"), reason


def classify_job(nodes: Sequence[NodeExit]) -> tuple[NodeState, str | None]:
    """Return the state of a job and the reason, which names the host where there are several.

    ``nodes`` are in the order in which their ends were observed.
    """

    def priority(node: NodeExit) -> tuple[int, bool, int]:
        cause = first_cause(node.ranks)
        is_echo = node.state == "failed" and cause is not None and cause.lost_connection  # comes after a lost node
        of_rank = _priority(cause)[0] if cause is not None else len(_CAUSES) + 1
        return _NODE_CAUSES.index("lost" if is_echo else node.state), is_echo, of_rank

    bad = [node for node in nodes if node.state != "succeeded"]
    if not bad:
        return "succeeded", None
    first = min(bad, key=priority)
    where = f"{first.host}: " if len(nodes) > 1 else ""
    return first.state, f"{where}{first.reason}"
