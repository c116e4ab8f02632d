"""Read the evaluation job of a finished round: metrics of its final weights, and steps replayed from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from accelmark.results.read.round_dir import node_dirs
from accelmark.results.read.train_log import Attempt, read_train_log
from accelmark.spec.errors import RunError
from accelmark.spec.events import Evaluated, Event, Replayed
from accelmark.spec.perflog import PerfLogReader

PREFIX: Final = "evaluation-"
"""``<key slug>/evaluation-round<N>`` is next to ``<key slug>/round<N>``."""


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
