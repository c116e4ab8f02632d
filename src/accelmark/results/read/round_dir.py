"""Read the directory of a round: its job, its hosts, how they exited, and its evaluation job.

The evaluation job has metrics of the round's weights and replayed steps, from a process without vendor code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional

from pydantic import ValidationError

from accelmark.results.read.rank_log import Attempt, read_train_log, warning_text
from accelmark.results.schema import JobState
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError, raising
from accelmark.spec.job import JobSpec, NodeExit
from accelmark.spec.log.events import CheckpointHashes, Evaluated, Event, Replayed, SavedCheckpoint, UpdateSquares
from accelmark.spec.log.perflog import PerfLogReader
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
    named = (one for one in entries if isinstance(one.get("directory"), str) and isinstance(one.get("job"), dict))
    return {one["directory"]: one["job"] for one in named}


def rank_logs(round_dir: Path) -> dict[int, Path]:
    """Return the log of each rank, in order."""
    return dict(sorted(log for node in node_dirs(round_dir) for log in node.rank_logs()))


def earlier_attempts(round_dir: Path) -> list[Path]:
    """Return the directories ``attempt<N>``, to which ``resume`` moves earlier attempts, in which ranks wrote logs."""
    attempts = sorted(round_dir.glob("attempt*"), key=lambda path: int(path.name.removeprefix("attempt")))
    return [path for path in attempts if rank_logs(path)]


REEVALUATION_PREFIX: Final = "evaluation-"
"""``<key slug>/evaluation-round<N>`` is next to ``<key slug>/round<N>``."""

Metrics = Mapping[str, Optional[float]]


class ReplayedStep(NamedTuple):
    """The loss of one step on one rank, in the round and in the replay."""

    rank: int
    step: int
    reported: float | None
    replayed: float | None


class ReplayedSteps(NamedTuple):
    """Steps that were replayed, over all ranks."""

    start: str | None
    """None: the case's initial weights."""
    steps: tuple[ReplayedStep, ...]
    update: UpdateSquares | None
    """Summed over the ranks; None where only losses were compared."""
    state: Mapping[str, UpdateSquares]
    """The same of buffers and of each kind of the optimizer's state."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len({step.step for step in self.steps})

    @property
    def what(self) -> str:
        """The steps in words."""
        first = min((step.step for step in self.steps), default=0)
        return f"steps {first} to {first + self.num_steps - 1}"


class Start(NamedTuple):
    """What a rank did before its first step, which no throughput counts, and the same rank of the evaluation job."""

    wall_s: tuple[float, float]
    """Of the round, and of the evaluation job, which builds the same model without the vendor's code."""
    cpu_s: tuple[float, float]
    train_s: tuple[float, float]
    """Training without evaluation after this start, and the CPU time of its steps (NaN where it was not logged)."""


class Reevaluation(NamedTuple):
    """Results of the evaluation job of a round, and those that the round had reported."""

    problem: str | None
    """Why the job did not complete; None where it did."""
    metrics: Metrics | None
    """Of the final weights; None where they were not evaluated."""
    claimed: Metrics | None
    """Of the weights of the first evaluation that reached the target, where training continued after it."""
    reported: Metrics
    """Metrics of the round's last evaluation."""
    replays: tuple[ReplayedSteps, ...]
    starts: tuple[Start, ...]
    """Of all ranks and attempts; without those whose log lacks a time."""
    evaluations_s: tuple[float, ...]
    """Durations of the round's evaluations, which no throughput counts."""
    evaluation_s: float | None
    """Of the longest evaluation of this job; None where it evaluated nothing."""
    unpaired: tuple[range, ...]
    """Steps of each attempt at a resumed round for which no pair of checkpoints was kept."""
    warnings: tuple[str, ...]
    """Of its ranks."""
    duration_s: float | None
    """From the start of the node agent to its end, the longest over the hosts."""


class SavedCheckpoints(NamedTuple):
    """The checkpoints of a round, as rank 0 logged them."""

    steps: Mapping[str, int]
    """Name -> optimizer steps done."""
    hashes: CheckpointHashes | None
    """None in rounds of earlier versions, and where training did not complete."""
    on_hosts: Mapping[int, Mapping[str, str]]
    """First rank of each further host that keeps checkpoints of its own -> SHA-256 of each, by name."""


def reevaluation_dir(round_dir: Path) -> Path:
    """Return the directory of the evaluation job of a round."""
    return round_dir.with_name(f"{REEVALUATION_PREFIX}{round_dir.name}")


def was_cancelled(round_dir: Path) -> bool:
    """Return whether the evaluation job of a round was ended by a request to stop."""
    ends = (node.exit for node in node_dirs(reevaluation_dir(round_dir)))
    return any(end is not None and end.state == "cancelled" for end in ends)


def read_reevaluation(round_dir: Path, place: Path | None = None) -> Reevaluation | None:
    """Read the evaluation job of a round, by default in :func:`reevaluation_dir`; None where there was none."""
    place = place or reevaluation_dir(round_dir)
    nodes = node_dirs(place)
    if not nodes:
        return None
    problem: str | None = None
    for node in reversed(nodes):
        end = node.exit
        if end is None or end.reason is not None:
            problem = node.problem if end is None else end.reason
        elif end.changed_data or end.changed_code:
            what, changed = ("data", end.changed_data) if end.changed_data else ("code", end.changed_code)
            problem = f"{end.host}: {what} was changed while it ran: {', '.join(changed)}"
    evaluated: dict[str, Evaluated] = {}
    replayed: list[tuple[int, Replayed]] = []
    warnings: dict[str, None] = {}
    logs = rank_logs(round_dir)
    again: dict[int, Attempt] = {}
    for rank, path in rank_logs(place).items():
        if repeated := read_train_log(path, rank).attempts:
            again[rank] = repeated[-1]
        try:
            for record in PerfLogReader(path):
                if record.event == Event.EVALUATED:
                    value = record.value_as(Evaluated)
                    evaluated[value.weights] = value
                elif record.event == Event.WARNING:
                    warnings[warning_text(record.value)] = None
                elif record.event == Event.REPLAYED and rank in logs:
                    replayed.append((rank, record.value_as(Replayed)))
        except (RunError, ValidationError) as error:
            problem = problem or f"{path.name}: {error}"
    attempts = {rank: read_train_log(path, rank).attempts for rank, path in logs.items()}
    lead = next(iter(attempts.values()), [])
    starts: list[Start] = []
    for rank, other in again.items():
        for attempt in attempts.get(rank, ()):
            wall, cpu, other_wall, other_cpu = attempt.init_s, attempt.init_cpu_s, other.init_s, other.init_cpu_s
            if wall is not None and other_wall is not None and cpu is not None and other_cpu is not None:
                train_s = attempt.train_ms / 1e3 - attempt.eval_s, sum(attempt.windows.cpu_ms) / 1e3
                starts.append(Start((wall, other_wall), (cpu, other_cpu), train_s))
    evaluations = [evaluation for attempt in lead for _, evaluation in attempt.evaluations]
    weights = list(evaluated.values())
    return Reevaluation(
        problem=problem,
        metrics=weights[0].metrics if weights else None,
        claimed=weights[1].metrics if len(weights) > 1 else None,
        reported=evaluations[-1].metrics if evaluations else {},
        replays=tuple(_merged(replayed, attempts)),
        starts=tuple(starts),
        evaluations_s=tuple(evaluation.duration_s for evaluation in evaluations),
        evaluation_s=max((value.duration_s for value in weights), default=None),
        unpaired=tuple(_unpaired(round_dir, lead)) if len(lead) > 1 else (),
        warnings=tuple(warnings),
        duration_s=max((node.exit.duration_s for node in nodes if node.exit is not None), default=None),
    )


def _merged(replayed: list[tuple[int, Replayed]], attempts: dict[int, list[Attempt]]) -> Iterator[ReplayedSteps]:
    losses: dict[int, dict[int, float]] = {}
    for rank, tried in attempts.items():
        own = losses.setdefault(rank, {})
        for attempt in tried:
            own.update(zip_strict(attempt.loss_steps(), attempt.losses))
    by_start: dict[str | None, list[tuple[int, Replayed]]] = {}
    for rank, value in replayed:
        by_start.setdefault(value.checkpoint, []).append((rank, value))
    for start, values in by_start.items():
        replays = ((rank, enumerate(value.losses, start=value.first_step)) for rank, value in values)
        steps = [ReplayedStep(rank, step, losses[rank].get(step), loss) for rank, own in replays for step, loss in own]
        updates = [value.update for _, value in values if value.update is not None]
        state: dict[str, UpdateSquares] = {}
        for _, value in values:
            state |= {name: state[name] + own if name in state else own for name, own in value.state.items()}
        yield ReplayedSteps(start, tuple(steps), reduce(operator.add, updates) if updates else None, state)


def _unpaired(round_dir: Path, attempts: Sequence[Attempt]) -> Iterator[range]:
    """Yield the steps of each attempt, up to those that the next one repeated, that no pair of checkpoints has."""
    saved = saved_checkpoints(round_dir)
    if saved.hashes is None or saved.hashes.reason is not None:
        return
    known = [(start, end) for start, end in saved.hashes.pairs if start in saved.steps and end in saved.steps]
    pairs = [(saved.steps[start] + 1, saved.steps[end]) for start, end in known if start is not None]
    listed = [steps for attempt in attempts if (steps := list(attempt.loss_steps()))]
    ends = [*(steps[0] for steps in listed[1:]), *(steps[-1] + 1 for steps in listed[-1:])]
    for steps, stop in zip_strict(listed, ends):
        if not any(steps[0] <= first and last < stop for first, last in pairs):
            yield range(steps[0], stop)


def saved_checkpoints(round_dir: Path) -> SavedCheckpoints:
    """Read the checkpoints of a round from the logs of its ranks."""
    steps: dict[str, int] = {}
    hashes: CheckpointHashes | None = None
    on_hosts: dict[int, Mapping[str, str]] = {}
    first_logs = {logs[0][1] for node in node_dirs(round_dir) if (logs := node.rank_logs())}
    for number, (rank, log) in enumerate(rank_logs(round_dir).items()):
        for record in PerfLogReader(log) if log in first_logs else ():
            if record.event == Event.CHECKPOINT and number == 0:
                saved = record.value_as(SavedCheckpoint)
                steps[saved.name] = saved.global_steps
            elif record.event == Event.CHECKPOINTS_HASHED and number == 0:
                hashes = record.value_as(CheckpointHashes)
                steps |= hashes.steps
            elif record.event == Event.CHECKPOINTS_HASHED:
                on_hosts[rank] = record.value_as(CheckpointHashes).sha256
    shared = hashes.sha256 if hashes is not None else {}
    on_hosts = {rank: sha256 for rank, sha256 in on_hosts.items() if sha256 != shared}
    return SavedCheckpoints(steps, hashes, on_hosts)
