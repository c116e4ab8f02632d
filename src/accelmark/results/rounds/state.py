"""Decide the state of a round from the exit records of its nodes, the coordinator's events and the ranks' logs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from accelmark.results.read.round_dir import LedgerState, NodeDir
from accelmark.results.rounds.hosts import is_busy
from accelmark.results.schema import Finding, JobState, Mark
from accelmark.spec.job import JobSpec, NodeExit

_WORST_FIRST: Final[tuple[JobState, ...]] = ("failed", "timed_out", "lost", "cancelled")
_FINAL: Final = frozenset({"succeeded", *_WORST_FIRST})


def job_state(
    job: JobSpec, nodes: list[NodeDir], rank_error: str | None, has_events: bool, ledger: LedgerState | None
) -> tuple[JobState, str | None]:
    """Return the state of a round and, unless it succeeded, the reason.

    Args:
        job: the job.
        nodes: the directories of its hosts.
        rank_error: the message of the first rank whose FINISHED event is not ``completed``.
        has_events: whether any rank wrote an event.
        ledger: the last state that the coordinator recorded.
    """
    if ledger is not None and ledger[0] in _FINAL and ledger[0] != "succeeded":
        return ledger[0], ledger[1] or rank_error or f"the coordinator recorded the state {ledger[0]}"
    exits = [(node, node.exit) for node in nodes if node.exit is not None]
    for state in _WORST_FIRST:
        for node, node_exit in exits:
            if node_exit.state == state:
                return state, _reason(node, node_exit, rank_error)
    if len(exits) < job.key.nnodes:
        if ledger is not None and ledger[0] not in _FINAL:
            return ledger[0], ledger[1] or "the job has not ended"
        if not nodes:
            return "queued", "the job was not started"
        missing = [node.problem for node in nodes if node.problem]
        return "lost", missing[0] if missing else f"{job.key.nnodes - len(exits)} hosts wrote no files"
    if not has_events:
        return "failed", "no rank wrote an event"
    return ("failed", rank_error) if rank_error else ("succeeded", None)


def _reason(node: NodeDir, node_exit: NodeExit, rank_error: str | None) -> str:
    if node_exit.reason:
        return node_exit.reason
    for rank in node_exit.ranks:
        if rank.state != "succeeded":
            return f"{node.host}, rank {rank.rank}: {rank.reason or rank.state}"
    return rank_error or f"{node.host}: the node's state is {node_exit.state}"


def round_marks(
    job: JobSpec,
    state: JobState,
    findings: Iterable[Finding],
    *,
    synthetic: bool,
    partial_evaluation: bool,
    resumed: bool = False,
) -> tuple[Mark, ...]:
    """Return the marks of a round that limit what its figures show."""
    marks: dict[Mark, bool] = {
        "open": job.open or any(setting.forced for setting in job.provenance.values()),
        "synthetic": synthetic,
        "partial": state != "succeeded",
        "partial_evaluation": partial_evaluation,
        "busy_machine": is_busy(findings),
        "resumed": resumed,
    }
    return tuple(mark for mark, applies in marks.items() if applies)
