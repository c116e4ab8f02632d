"""Read the directory of a round: its job, its hosts, how they exited, and its evaluation job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional

from pydantic import ValidationError

from accelmark.results.schema import JobState
from accelmark.spec.errors import RunError, raising
from accelmark.spec.job import JobSpec, NodeExit
from accelmark.spec.model import json_objects

LedgerState = tuple[JobState, Optional[str]]

_NODE: Final = re.compile(r"^(?P<host>.+)_noderank(?P<noderank>\d+)$")
_RANK: Final = re.compile(r"^rank(?P<rank>\d+)\.out\.log$")


class NodeDir(NamedTuple):
    """The directory of a round on one host."""

    path: Path
    host: str
    noderank: int
    exit: NodeExit | None
    problem: str | None
    """Why ``exit`` is None."""

    def rank_logs(self) -> list[tuple[int, Path]]:
        """Return (global rank, path) of each rank's log."""
        matches = ((_RANK.match(path.name), path) for path in self.path.iterdir())
        return sorted((int(match["rank"]), path) for match, path in matches if match)


def read_job(round_dir: Path) -> JobSpec:
    """Read ``job.json``. Raises RunError naming the file when it is missing or invalid."""
    path = round_dir / "job.json"
    with raising(RunError, f"{path}: cannot be read as a job", OSError, ValidationError):
        return JobSpec.model_validate_json(path.read_bytes())


def node_dirs(round_dir: Path) -> list[NodeDir]:
    """Return the directories of a round's hosts, by node rank."""
    if not round_dir.is_dir():
        return []
    nodes: list[NodeDir] = []
    for path in round_dir.iterdir():
        if path.is_dir() and (match := _NODE.match(path.name)):
            host, problem, end = match["host"], None, None
            try:
                end = NodeExit.model_validate_json((path / "exit.json").read_bytes())
            except FileNotFoundError:
                problem = f"{host}: the node agent wrote no exit.json"
            except (OSError, ValidationError) as error:
                problem = f"{host}: exit.json cannot be read: {type(error).__name__}"
            nodes.append(NodeDir(path, host, int(match["noderank"]), end, problem))
    return sorted(nodes, key=lambda node: node.noderank)


def ledger_states(run_dir: Path) -> dict[str, LedgerState]:
    """Return the last state of each job in the run's ``events.jsonl``."""
    states: dict[str, LedgerState] = {}
    for event in ledger_events(run_dir):
        if event.get("kind") == "state" and event.get("job") and event.get("state"):
            states[str(event["job"])] = (event["state"], event.get("reason"))
    return states


def ledger_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of the run's ``events.jsonl``; damaged ones are ignored."""
    return json_lines(run_dir / "events.jsonl")


def json_lines(*paths: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of files; files that cannot be read and damaged lines are ignored."""
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            yield from json_objects(file)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where the file is missing or invalid."""
    with suppress(OSError):
        return next(json_objects([path.read_bytes()]), {})
    return {}


def planned_jobs(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the planned jobs by directory; empty where the plan is unreadable."""
    jobs = plan.get("jobs")
    entries = [entry for entry in jobs if isinstance(entry, dict)] if isinstance(jobs, list) else []
    return {
        entry["directory"]: entry["job"]
        for entry in entries
        if isinstance(entry.get("directory"), str) and isinstance(entry.get("job"), dict)
    }


def rank_logs(round_dir: Path) -> dict[int, Path]:
    """Return the log of each rank, in order."""
    return dict(sorted(log for node in node_dirs(round_dir) for log in node.rank_logs()))


def earlier_attempts(round_dir: Path) -> list[Path]:
    """Return the directories ``attempt<N>``, to which ``resume`` moves earlier attempts, in which ranks wrote logs."""
    attempts = sorted(round_dir.glob("attempt*"), key=lambda path: int(path.name.removeprefix("attempt")))
    return [path for path in attempts if rank_logs(path)]
