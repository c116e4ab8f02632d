"""Name the rank of a stalled job that stopped first, from the reports of all hosts' agents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from accelmark.spec.job import NodeExit, RankStall

_SILENT: Final = 0.5
"""Share of the longest silence from which a rank counts as silent: others still wrote events."""
_COMMUNICATES: Final = re.compile(
    r"distributed/|distributed_c10d|collective|all_?reduce|all_?gather|reduce_?scatter|barrier|broadcast"
)
"""In the frames of a rank that waits for others."""
_UNKNOWN: Final = "which rank stopped first is unknown: the stacks of all ranks are in exit.json of each host"


def stall_cause(nodes: Sequence[NodeExit]) -> str | None:
    """Return which rank stopped first, with its host and the evidence, or that it is unknown; None without a stall.

    Evidence, the strongest first: a rank that is silent while others are not; a stopped process; a process in
    uninterruptible sleep; a rank behind all others in steps, or in collectives; a rank outside of communication while
    all others are inside; a rank (of three or more) in another function than all others.
    """
    ranks = [(node, rank) for node in nodes if node.stall is not None for rank in node.stall.ranks]
    ranks = [(node, rank) for node, rank in ranks if not rank.has_finished]
    if not ranks:
        return None
    longest = max(rank.silent_s for _, rank in ranks)
    silent = [(node, rank) for node, rank in ranks if rank.silent_s >= _SILENT * longest]
    if len(silent) == 1:
        node, rank = silent[0]
        what = node.reason or f"rank {rank.rank} wrote no event"
    elif (suspect := _suspect([rank for _, rank in silent])) is not None:
        rank, why = suspect
        node = next(node for node, silent_rank in silent if silent_rank is rank)
        what = f"rank {rank.rank} stopped first: {why}"
    else:
        return _UNKNOWN + "".join(_messages(node) for node in nodes)
    where = f"{node.host}: " if len(nodes) > 1 else ""
    at = f"; it was at {rank.stack[0]}" if rank.stack else ""
    return where + what + at + "".join(f"; {child}" for child in rank.children[:1]) + _messages(node)


def _suspect(silent: Sequence[RankStall]) -> tuple[RankStall, str] | None:
    """Return the rank that the strongest evidence singles out, with that evidence; None where none does."""
    known = [rank for rank in silent if rank.process_state is not None]
    stopped = [rank for rank in known if rank.process_state in ("T", "t")]
    if len(stopped) == 1 or (stopped and len(stopped) < len(known)):
        return stopped[0], "its process is stopped (state T: by SIGSTOP or a debugger)"
    asleep = [rank for rank in known if rank.process_state == "D"]
    if len(asleep) == 1 < len(known):
        place = f" in {asleep[0].waits_in}" if asleep[0].waits_in else ""
        return asleep[0], f"its process is in uninterruptible sleep{place} (state D)"
    steps = sorted((rank.last_step if rank.last_step is not None else 0, index) for index, rank in enumerate(silent))
    if steps[0][0] < steps[1][0]:
        return silent[steps[0][1]], f"its last step was {steps[0][0]}, that of the others {steps[1][0]} or later"
    if (behind := _behind(silent)) is not None:
        return behind
    outside = [
        rank for rank in silent if rank.stack and not any(_COMMUNICATES.search(frame) for frame in rank.stack[:3])
    ]
    if len(outside) == 1 and all(rank.stack for rank in silent):
        return outside[0], "it is the only one that does not wait in communication"
    places = Counter(_function(rank) for rank in silent if rank.stack)
    odd = [rank for rank in silent if rank.stack and places[_function(rank)] == 1]
    if len(odd) == 1 and len(places) == 2 and len(silent) > 2 and all(rank.stack for rank in silent):
        return odd[0], "all others are in another function"
    return None


def _behind(silent: Sequence[RankStall]) -> tuple[RankStall, str] | None:
    """Return the rank that has not started a collective which all others have."""
    last = [{collective.group: collective for collective in rank.collectives} for rank in silent]
    for group in last[0]:
        if all(group in collectives for collectives in last):
            order = sorted((collectives[group].number, index) for index, collectives in enumerate(last))
            number, index = order[0]
            if number < order[1][0]:
                known = last[index][group].operation
                others = f"that of the others number {order[1][0]} or later"
                return silent[index], f"its last collective in group {group} was number {number} ({known}), {others}"
    return None


def _function(rank: RankStall) -> str:
    place, _, function = rank.stack[0].partition(" in ")
    return f"{place.rpartition(':')[0]} {function}"


def _messages(node: NodeExit) -> str:
    if node.stall is None:
        return ""
    full = "".join(f"; {what} on {node.host}" for what in node.stall.full_file_systems)
    messages = node.stall.kernel_messages
    return full + (f"; the kernel of {node.host}: {messages[-1]}" if messages else "")
