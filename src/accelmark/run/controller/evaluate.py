"""Evaluate the final weights of a finished run again, and replay steps, in jobs without vendor code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from accelmark.plan.plan import PlannedJob
from accelmark.results.read.round_dir import REEVALUATION_PREFIX, reevaluation_dir, saved_checkpoints
from accelmark.run.agent.rank_exit import classify_job
from accelmark.run.controller.coordinator import FetchData, write_job
from accelmark.run.controller.waiting import run_agents
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import EvaluateJob, TrainJob


@final
@dataclass(frozen=True, slots=True)
class RoundEvaluation:
    """The evaluation job of one round."""

    round_dir: Path
    state: str
    reason: str | None
    num_steps: int
    """Replayed optimizer steps; 0 where no checkpoint is old enough."""


def evaluate_run(path: Path, fetch: FetchData, num_steps: int, report: Callable[[str], None]) -> list[RoundEvaluation]:
    """Evaluate the final weights of each round of the run at ``path``, and replay ``num_steps`` optimizer steps.

    Raises:
        RequestError: no round trained to its end and saved its final weights.
        AccelmarkError: a host cannot run a job.
    """
    directory = RunDirectory.open(path)
    with directory.locked():
        statuses = directory.statuses()
        succeeded = [job for job in directory.plan.jobs if statuses[job.directory].state == "succeeded"]
        planned = list(filter(None, (_evaluation(directory, job, num_steps) for job in succeeded)))
        if not planned:
            raise RequestError(
                f"{path}: no round that succeeded saved its final weights; "
                "train with checkpoint.every_steps set, and keep the run's checkpoints"
            )
        return asyncio.run(_run_all(directory, planned, fetch, report))


def _evaluation(directory: RunDirectory, job: PlannedJob, num_steps: int) -> PlannedJob | None:
    """Return the evaluation job of a round; None where it did not train, or its final weights were not saved."""
    train, round_dir = job.job.work, directory.round_dir(job)
    here = round_dir / "checkpoints"  # absent where checkpoints are on other hosts, and assumed to exist there
    saved = saved_checkpoints(round_dir).items()
    checkpoints = {step: name for step, name in saved if not here.is_dir() or (here / name).is_dir()}
    if not isinstance(train, TrainJob) or not checkpoints:
        return None
    final = max(checkpoints)
    starts = [step for step in checkpoints if step + max(num_steps, 1) <= final]
    replays = num_steps > 0 and bool(starts)
    work = EvaluateJob(
        unit=train.unit,
        units_per_sample=train.units_per_sample,
        train=train,
        weights=Path(checkpoints[final]),
        checkpoint=Path(checkpoints[max(starts)]) if replays else None,
        num_steps=num_steps if replays else 0,
    )
    place = reevaluation_dir(round_dir)
    changed = {
        "work": work,
        "extern": None,
        "adaptation": None,
        "checkpoint_dir": Path(os.path.relpath(round_dir / job.job.checkpoint_dir, place)),
    }
    command = ("python", "-m", work.rank_module, "job.json")
    nodes = tuple(node.model_copy(update={"command": command}) for node in job.nodes)
    name = place.relative_to(directory.path).as_posix()
    return PlannedJob(directory=name, job=job.job.model_copy(update=changed), nodes=nodes)


async def _run_all(
    directory: RunDirectory, planned: list[PlannedJob], fetch: FetchData, report: Callable[[str], None]
) -> list[RoundEvaluation]:
    launcher = create_launcher(directory.plan, directory.path)
    try:
        return [await _run(directory, job, launcher, fetch, report) for job in planned]
    finally:
        await launcher.close()


async def _run(
    directory: RunDirectory, job: PlannedJob, launcher: Launcher, fetch: FetchData, report: Callable[[str], None]
) -> RoundEvaluation:
    place = directory.round_dir(job)
    if any(place.glob("*_noderank*")):
        raise RunError(f"{place}: exists; remove it to evaluate the round again")
    nodes = write_job(directory, job, launcher)
    if launcher.spec.shares_filesystem:
        await asyncio.to_thread(fetch, nodes[0].job, report)
    report(f"{job.directory}: running")
    state, reason = classify_job(await run_agents([launcher.agent(node) for node in nodes]))
    num_steps = job.job.work.num_steps if isinstance(job.job.work, EvaluateJob) else 0
    return RoundEvaluation(place.with_name(place.name.removeprefix(REEVALUATION_PREFIX)), state, reason, num_steps)
