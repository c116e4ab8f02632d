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
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import classify_job
from accelmark.run.controller.coordinator import FetchData
from accelmark.run.controller.node_jobs import JOB_FILE, job_on_hosts, node_jobs
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import EvaluateJob, NodeExit, TrainJob


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
        succeeded = [name for name, status in directory.statuses().items() if status.state == "succeeded"]
        trained = [job for job in directory.plan.jobs if isinstance(job.job.work, TrainJob)]
        planned = [
            evaluation
            for job in trained
            if job.directory in succeeded and (evaluation := _evaluation(directory, job, num_steps)) is not None
        ]
        if not planned:
            raise RequestError(
                f"{path}: no round that succeeded saved its final weights; "
                "train with checkpoint.every_steps set, and keep the run's checkpoints"
            )
        return asyncio.run(_run_all(directory, planned, fetch, report))


def _evaluation(directory: RunDirectory, job: PlannedJob, num_steps: int) -> PlannedJob | None:
    """Return the evaluation job of a round; None where its final weights were not saved."""
    train = job.job.work
    round_dir = directory.round_dir(job)
    checkpoints = {step: name for step, name in saved_checkpoints(round_dir).items() if _exists(round_dir, name)}
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


def _exists(round_dir: Path, name: str) -> bool:
    """Return whether a checkpoint exists; those on other hosts are assumed to."""
    checkpoints = round_dir / "checkpoints"
    return not checkpoints.is_dir() or (checkpoints / name).is_dir()


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
    make_directory(place)
    spec = job_on_hosts(directory, job, go_on=False)
    write_atomic(place / JOB_FILE, spec.model_dump_json(indent=2))
    if launcher.spec.shares_filesystem:
        await asyncio.to_thread(fetch, spec, report)
    report(f"{job.directory}: running")
    agents: list[AgentHandle] = [launcher.agent(node) for node in node_jobs(directory, job, spec, launcher)]
    await asyncio.gather(*(agent.prepare() for agent in agents))
    await asyncio.gather(*(agent.start() for agent in agents))
    ends: list[NodeExit] = list(await asyncio.gather(*(agent.wait() for agent in agents)))
    state, reason = classify_job(ends, [end.noderank for end in ends])
    work = spec.work
    num_steps = work.num_steps if isinstance(work, EvaluateJob) else 0
    return RoundEvaluation(place.with_name(place.name.removeprefix(REEVALUATION_PREFIX)), state, reason, num_steps)
