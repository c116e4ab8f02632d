"""Read the directory of a round: its job, its hosts and how they exited, and the evaluation job of a finished round.

The evaluation job has the metrics of the final weights, and steps replayed from a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from accelmark.results.read.rank_log import Attempt, read_train_log
from accelmark.results.schema import JobState
from accelmark.spec.errors import RunError
from accelmark.spec.events import Evaluated, Event, Replayed
from accelmark.spec.job import JobSpec, NodeExit
from accelmark.spec.model import first_error
from accelmark.spec.perflog import PerfLogReader

LedgerState = tuple[JobState, str | None]
"""A state that the coordinator recorded, and its reason."""

REEVALUATION_PREFIX: Final = "evaluation-"
"""``<key slug>/evaluation-round<N>`` is next to ``<key slug>/round<N>``."""
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
        found = ((_RANK.match(path.name), path) for path in self.path.iterdir())
        return sorted((int(match["rank"]), path) for match, path in found if match)


def read_job(round_dir: Path) -> JobSpec:
    """Read ``job.json``. Raises RunError naming the file when it is missing or invalid."""
    path = round_dir / "job.json"
    try:
        return JobSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RunError(f"{path}: is not a valid job: {first_error(error)}") from error


def node_dirs(round_dir: Path) -> list[NodeDir]:
    """Return the directories of a round's hosts, by node rank."""
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
        problem = f"{host}: the node agent wrote no {file.name}"
    except (OSError, ValidationError) as error:
        problem = f"{host}: {file.name} cannot be read: {type(error).__name__}"
    return NodeDir(path, host, noderank, None, problem)


def ledger_states(run_dir: Path) -> dict[str, LedgerState]:
    """Return the last state of each job in the run's ``events.jsonl``."""
    states: dict[str, LedgerState] = {}
    for event in ledger_events(run_dir):
        if event.get("kind") == "state" and event.get("job") and event.get("state"):
            states[str(event["job"])] = (event["state"], event.get("reason"))
    return states


def ledger_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the run's ``events.jsonl``; damaged ones are ignored."""
    try:
        lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = from_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where the file is missing or invalid."""
    try:
        loaded = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def planned_jobs(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the planned jobs by directory; empty where the plan is unreadable."""
    jobs = plan.get("jobs")
    entries = [entry for entry in jobs if isinstance(entry, dict)] if isinstance(jobs, list) else []
    return {
        entry["directory"]: entry["job"]
        for entry in entries
        if isinstance(entry.get("directory"), str) and isinstance(entry.get("job"), dict)
    }


class ReplayedStep(NamedTuple):
    """The loss of one step on one rank, in the round and in the replay."""

    rank: int
    step: int
    reported: float | None
    replayed: float | None


class Reevaluation(NamedTuple):
    """Results of the evaluation job of a round, and those that the round had reported."""

    problem: str | None
    """Why the job did not complete; None where it did."""
    metrics: Mapping[str, float | None] | None
    """Of the final weights; None where they were not evaluated."""
    reported: Mapping[str, float | None]
    """Metrics of the round's last evaluation."""
    steps: tuple[ReplayedStep, ...]


def reevaluation_dir(round_dir: Path) -> Path:
    """Return the directory of the evaluation job of a round."""
    return round_dir.with_name(f"{REEVALUATION_PREFIX}{round_dir.name}")


def read_reevaluation(round_dir: Path) -> Reevaluation | None:
    """Read the evaluation job of a round; None where there was none."""
    nodes = node_dirs(reevaluation_dir(round_dir))
    if not nodes:
        return None
    problems = (node.exit.reason if node.exit is not None else node.problem for node in nodes)
    problem = next(filter(None, problems), None)
    metrics: Mapping[str, float | None] | None = None
    steps: list[ReplayedStep] = []
    logs = _rank_logs(round_dir)
    for rank, path in _rank_logs(reevaluation_dir(round_dir)).items():
        try:
            for record in PerfLogReader(path):
                if record.event == Event.EVALUATED:
                    metrics = record.value_as(Evaluated).metrics
                elif record.event == Event.REPLAYED and rank in logs:
                    steps += _steps(rank, record.value_as(Replayed), read_train_log(logs[rank], rank).attempts)
        except (RunError, ValidationError) as error:
            problem = problem or f"{path.name}: {error}"
    lead = [attempt for rank, log in list(logs.items())[:1] for attempt in read_train_log(log, rank).attempts]
    evaluations = [evaluation for attempt in lead for _, evaluation in attempt.evaluations]
    return Reevaluation(problem, metrics, evaluations[-1].metrics if evaluations else {}, tuple(steps))


def _steps(rank: int, replayed: Replayed, attempts: Iterable[Attempt]) -> Iterator[ReplayedStep]:
    losses: dict[int, float] = {}
    for attempt in attempts:
        losses.update(zip(attempt.loss_steps(), attempt.losses, strict=True))
    for step, loss in enumerate(replayed.losses, start=replayed.first_step):
        yield ReplayedStep(rank, step, losses.get(step), loss)


def saved_checkpoints(round_dir: Path) -> dict[int, str]:
    """Return the checkpoints that rank 0 of a round reported: optimizer steps done -> name, in order."""
    records = (record for log in list(_rank_logs(round_dir).values())[:1] for record in PerfLogReader(log))
    values = (record.value for record in records if record.event == Event.CHECKPOINT)
    return dict(sorted((int(value["global_steps"]), str(value["name"])) for value in values))


def _rank_logs(round_dir: Path) -> dict[int, Path]:
    """Return the log of each rank, in order."""
    return dict(sorted(log for node in node_dirs(round_dir) for log in node.rank_logs()))
