"""How a round ended: what its node agents, its coordinator and its ranks say, in one state with a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pydantic import ValidationError
from pydantic_core import from_json

from accelmark.results.figures.timeline import Timeline
from accelmark.results.schema import JobState
from accelmark.spec.job import JobSpec, NodeExit

_NODE: Final = re.compile(r"^(?P<host>.+)_noderank(?P<noderank>\d+)$")
_RANK: Final = re.compile(r"^rank(?P<rank>\d+)\.out\.log$")
_WORST_FIRST: Final[tuple[JobState, ...]] = ("failed", "timed_out", "lost", "cancelled")
_ENDS: Final = frozenset({"succeeded", "failed", "timed_out", "lost", "cancelled"})


@final
@dataclass(frozen=True, slots=True)
class NodeDir:
    """What one host left of a round."""

    path: Path
    host: str
    noderank: int
    exit: NodeExit | None
    problem: str | None
    """Why ``exit`` is missing."""

    def rank_logs(self) -> list[tuple[int, Path]]:
        """Return (global rank, path) of each rank's log."""
        found = ((_RANK.match(path.name), path) for path in self.path.iterdir())
        return sorted((int(match["rank"]), path) for match, path in found if match)


def node_dirs(round_dir: Path) -> list[NodeDir]:
    """Find the directories of a round's hosts, by node rank."""
    if not round_dir.is_dir():
        return []
    found = ((_NODE.match(path.name), path) for path in round_dir.iterdir() if path.is_dir())
    nodes = [_node_dir(path, match["host"], int(match["noderank"])) for match, path in found if match]
    return sorted(nodes, key=lambda node: node.noderank)


def _node_dir(path: Path, host: str, noderank: int) -> NodeDir:
    file = path / "exit.json"
    try:
        return NodeDir(path, host, noderank, NodeExit.model_validate_json(file.read_bytes()), None)
    except FileNotFoundError:
        problem = f"{host}: its node agent did not report how it ended ({file.name} is missing)"
    except (OSError, ValidationError) as error:
        problem = f"{host}: {file.name} cannot be read: {type(error).__name__}"
    return NodeDir(path, host, noderank, None, problem)


def state_of(
    job: JobSpec, nodes: list[NodeDir], timeline: Timeline | None, ledger: tuple[JobState, str | None] | None
) -> tuple[JobState, str | None]:
    """Return the state of a round and, unless it succeeded, what happened.

    Args:
        job: what was to be run.
        nodes: what its hosts left.
        timeline: what its ranks said.
        ledger: the state that the coordinator knows, if any.
    """
    return state_from(job, nodes, _told_by_ranks(timeline), timeline is not None, ledger)


def state_from(
    job: JobSpec, nodes: list[NodeDir], words: str | None, has_events: bool, ledger: tuple[JobState, str | None] | None
) -> tuple[JobState, str | None]:
    """Return the same as :func:`state_of`, from what the first rank that did not complete says of itself."""
    if ledger is not None and ledger[0] in _ENDS and ledger[0] != "succeeded":
        return ledger[0], ledger[1] or words or f"the coordinator ended it as {ledger[0]}"
    told = [(node, node.exit) for node in nodes if node.exit is not None]
    for state in _WORST_FIRST:
        for node, end in told:
            if end.state == state:
                return state, _reason(node, end, words)
    if len(told) < job.key.nnodes:
        if ledger is not None and ledger[0] not in _ENDS:
            return ledger[0], ledger[1] or "it has not ended"
        if not nodes:
            return "queued", "it was not started"
        missing = [node.problem for node in nodes if node.problem]
        return "lost", missing[0] if missing else f"{job.key.nnodes - len(told)} of its hosts left nothing"
    if not has_events:
        return "failed", "no rank wrote an event"
    return ("failed", words) if words else ("succeeded", None)


def _reason(node: NodeDir, end: NodeExit, words: str | None) -> str:
    if end.reason:
        return end.reason
    for rank in end.ranks:
        if rank.state != "succeeded":
            return f"{node.host}, rank {rank.rank}: {rank.reason or rank.state}"
    return words or f"{node.host} ended as {end.state}"


def _told_by_ranks(timeline: Timeline | None) -> str | None:
    """Return what the first rank that did not complete says of itself."""
    for end in timeline.ranks if timeline else ():
        if end.finished is not None and end.finished.state != "completed":
            return f"rank {end.rank}: {end.finished.message or end.finished.end_reason}"
    return None


def ledger_states(run_dir: Path) -> dict[str, tuple[JobState, str | None]]:
    """Read the last state of each job from ``events.jsonl``; lines that are no state are passed over."""
    states: dict[str, tuple[JobState, str | None]] = {}
    try:
        lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return states
    for line in lines:
        try:
            event = from_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("kind") == "state" and event.get("job") and event.get("state"):
            states[str(event["job"])] = (event["state"], event.get("reason"))
    return states


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where the file is missing or broken."""
    try:
        loaded = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
