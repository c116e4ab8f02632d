"""Read the evaluation job of a finished round: metrics of its final weights, and steps replayed from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from pydantic import ValidationError

from accelmark.results.read.round_dir import node_dirs
from accelmark.results.read.train_log import read_train_log
from accelmark.spec.errors import RunError
from accelmark.spec.events import Evaluated, Event, Replayed
from accelmark.spec.perflog import PerfLogReader

PREFIX: Final = "evaluation-"
"""``<key slug>/evaluation-round<N>`` is next to ``<key slug>/round<N>``."""


@final
@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The loss of one step on one rank, in the round and in the replay."""

    rank: int
    step: int
    reported: float | None
    replayed: float | None


@final
@dataclass(frozen=True, slots=True)
class Reevaluation:
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
    return round_dir.with_name(f"{PREFIX}{round_dir.name}")


def read_reevaluation(round_dir: Path) -> Reevaluation | None:
    """Read the evaluation job of a round; None where there was none."""
    nodes = node_dirs(reevaluation_dir(round_dir))
    if not nodes:
        return None
    problems = (node.exit.reason if node.exit is not None else node.problem for node in nodes)
    problem = next(filter(None, problems), None)
    metrics: Mapping[str, float | None] | None = None
    steps: list[ReplayedStep] = []
    reported_logs = {rank: path for node in node_dirs(round_dir) for rank, path in node.rank_logs()}
    for rank, path in (log for node in nodes for log in node.rank_logs()):
        try:
            for record in PerfLogReader(path):
                if record.event == Event.EVALUATED:
                    metrics = record.value_as(Evaluated).metrics
                elif record.event == Event.REPLAYED and rank in reported_logs:
                    steps += _steps(rank, record.value_as(Replayed), reported_logs[rank])
        except (RunError, ValidationError) as error:
            problem = problem or f"{path.name}: {error}"
    return Reevaluation(problem, metrics, _reported(reported_logs), tuple(steps))


def _steps(rank: int, replayed: Replayed, log: Path) -> list[ReplayedStep]:
    losses: dict[int, float] = {}
    for attempt in read_train_log(log, rank).attempts:
        position = 0
        for end, length in zip(attempt.window_steps, attempt.window_lengths, strict=True):
            numbers = range(int(end) - int(length) + 1, int(end) + 1)
            losses.update(zip(numbers, attempt.losses[position : position + int(length)], strict=True))
            position += int(length)
    return [
        ReplayedStep(rank, step, losses.get(step), loss)
        for step, loss in enumerate(replayed.losses, start=replayed.first_step)
    ]


def _reported(logs: Mapping[int, Path]) -> Mapping[str, float | None]:
    if not logs:
        return {}
    rank = min(logs)
    found = [
        evaluation for attempt in read_train_log(logs[rank], rank).attempts for _, evaluation in attempt.evaluations
    ]
    return found[-1].metrics if found else {}


def saved_checkpoints(round_dir: Path) -> dict[int, str]:
    """Return the checkpoints that rank 0 of a round reported: optimizer steps done -> name, in order."""
    logs = {rank: path for node in node_dirs(round_dir) for rank, path in node.rank_logs()}
    if not logs:
        return {}
    records = (record for record in PerfLogReader(logs[min(logs)]) if record.event == Event.CHECKPOINT)
    return dict(sorted((int(record.value["global_steps"]), str(record.value["name"])) for record in records))
