"""From what was seen of ranks and nodes to how a job ended, and why: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

from accelmark.run.agent.rank_output import LastWords
from accelmark.spec.job import NodeExit, RankExit, RankState

NodeState = Literal["succeeded", "failed", "timed_out", "lost", "cancelled"]

_SIGNAL_HINTS: Final = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: see dmesg",
    signal.SIGSEGV: "a fault in native code: see the last lines for its stack",
    signal.SIGBUS: "often shared memory that is too small, or a full disk under a mapped file",
    signal.SIGXFSZ: "a file grew beyond the limit for files",
}


@final
@dataclass(frozen=True, slots=True)
class Ending:
    """Why the agent itself ended its ranks, where it did."""

    rank_state: Literal["timed_out", "stalled", "cancelled", "failed", "lost"]
    node_state: NodeState
    reason: str


def signal_name(exit_code: int) -> str | None:
    """Return the name of the signal behind an exit code, Python's way (-9) or a shell's (137)."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return signal.Signals(number).name if number > 0 else None
    except ValueError:
        return None


def judge_rank(rank: int, local_rank: int, exit_code: int | None, words: LastWords, ending: Ending | None) -> RankExit:
    """Return how a rank ended, from its exit code, what its log says, and whether the agent ended it.

    Success takes both: exit code 0 and a FINISHED event that says so. A crash never reads as a finish.
    """
    name = signal_name(exit_code) if exit_code is not None else None
    state: RankState
    reason: str | None
    if exit_code == 0 and words.completed:
        state, reason = "succeeded", None
    elif ending is not None:
        state, reason = ending.rank_state, ending.reason
    elif words.cancelled:
        state, reason = "cancelled", words.cause or "was asked to end"
    elif name is not None and words.finished is None:
        state, reason = "signaled", _killed(name, words.cause)
    elif exit_code == 0 and words.finished is None:
        state, reason = "failed", words.cause or "ended with exit code 0, but never said that it had finished"
    elif exit_code is None:
        state, reason = "lost", words.cause or "ended without an exit code that anybody saw"
    else:
        state, reason = "failed", words.cause or f"ended with exit code {exit_code}"
    lines = () if state == "succeeded" else words.lines
    return RankExit(
        rank=rank, local_rank=local_rank, state=state, exit_code=exit_code, signal=name, reason=reason, last_lines=lines
    )


def overruled(seen: RankExit, ending: Ending | None) -> RankExit:
    """Return how a rank ended by its launcher's record, unless the agent had ended it: then that is why."""
    if ending is None or seen.state == "succeeded":
        return seen
    return seen.model_copy(update={"state": ending.rank_state, "reason": ending.reason})


def _killed(name: str, cause: str | None) -> str:
    hint = cause or _SIGNAL_HINTS.get(signal.Signals[name])
    return f"killed by {name}" + (f" ({hint})" if hint else "")


def first_cause(ranks: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose end explains the others': the one that failed of itself before those ended with it."""
    rest = [rank for rank in ranks if rank.state != "succeeded"]
    return min(rest, key=_blame, default=None)


def _blame(rank: RankExit) -> tuple[int, int]:
    """Order: died of a signal nobody here sent, raised something, was ended; echoes of another's death come last."""
    order: dict[RankState, int] = {"signaled": 1, "failed": 2, "lost": 3, "stalled": 4, "timed_out": 5, "cancelled": 6}
    echo = rank.state == "failed" and _is_echo(rank.reason or "")
    sent_by_launcher = rank.state == "signaled" and rank.signal == "SIGTERM"
    return (7 if echo or sent_by_launcher else order.get(rank.state, 8)), rank.rank


_ECHOES: Final = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket timeout", "processgroup",
    "ncclremoteerror", "distnetworkerror", "distbackenderror", "rendezvousconnectionerror",
)  # fmt: skip


def _is_echo(reason: str) -> bool:
    """Tell whether an exception is what survivors of another rank's death raise."""
    return any(word in reason.lower() for word in _ECHOES)


def judge_node(ranks: Sequence[RankExit], ending: Ending | None) -> tuple[NodeState, str | None]:
    """Return the state of a node and the reason, from its ranks and whether the agent ended them."""
    cause = first_cause(ranks)
    if cause is None and ranks:
        return "succeeded", None
    if ending is not None:
        return ending.node_state, ending.reason
    if cause is None:
        return "failed", "no rank was started"
    reason = cause.reason or cause.state
    if not reason.startswith(f"rank {cause.rank}"):
        reason = f"rank {cause.rank}: {reason}"
    return ("cancelled" if cause.state == "cancelled" else "failed"), reason


def judge_job(nodes: Sequence[NodeExit], order: Sequence[int]) -> tuple[NodeState, str | None]:
    """Return the state of a job and the reason, naming the host, from its nodes.

    Args:
        nodes: how each node ended.
        order: noderanks in the order in which their ends were seen.
    """
    bad = [node for node in nodes if node.state != "succeeded"]
    if not bad:
        return "succeeded", None
    position = {noderank: place for place, noderank in enumerate(order)}
    cause = min(bad, key=lambda node: (*_node_blame(node), position.get(node.noderank, len(position))))
    where = f"{cause.host}: " if len(nodes) > 1 else ""
    return cause.state, f"{where}{cause.reason}"


def _node_blame(node: NodeExit) -> tuple[int, int]:
    cause = first_cause(node.ranks)
    order: dict[NodeState, int] = {"failed": 1, "lost": 2, "timed_out": 3, "cancelled": 4}
    return order.get(node.state, 5), _blame(cause)[0] if cause is not None else 9
