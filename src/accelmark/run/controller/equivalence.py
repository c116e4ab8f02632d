"""Check that frameworks compute the same from the same weights and batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.equivalence import compare_steps
from accelmark.results.read.round_dir import node_dirs
from accelmark.results.rounds.timeline import read_timeline
from accelmark.run.agent.rank_exit import classify_job
from accelmark.run.controller.coordinator import PreflightCheck
from accelmark.run.controller.evaluate import FetchData
from accelmark.run.controller.node_jobs import write_job
from accelmark.run.controller.waiting import run_agents, run_until_signal
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.equivalence import TOLERANCES, ComparedJob, EquivalenceCheck, settings_hash
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import CompareJob, JobSpec, TrainJob
from accelmark.spec.log.events import Started

INPUTS: Final = "inputs"
"""Directory of a check with the initial weights and the batches."""


class _Done(NamedTuple):
    job: JobSpec
    started: Started
    results: Path


def check_equivalence(
    plan: Plan,
    path: Path,
    fetch: FetchData,
    preflight: PreflightCheck,
    observer: RunObserver,
    num_steps: int,
    num_batches: int,
) -> list[EquivalenceCheck]:
    """Take the first steps of all jobs of ``plan`` in a new directory at ``path``, and compare them with its first job.

    The first job writes initial weights and batches, which all jobs read. Returns one check for each framework, in
    the order of the plan.

    Raises:
        AccelmarkError: a host is not ready, or a job failed; its reason is given.
    """
    directory = RunDirectory.create(path, plan)
    done = run_until_signal(_run_all(directory, fetch, preflight, observer, num_steps, num_batches))
    reference, rest = done[0], [one for one in done[1:] if _computes_as_asked(one, observer)]
    checked_at = plan.created_at
    frameworks = dict.fromkeys(one.job.framework for one in rest)
    checks = []
    for framework in frameworks:
        compared = [
            _compared(reference, one, path / INPUTS, num_steps) for one in rest if one.job.framework == framework
        ]
        first = next(one for one in rest if one.job.framework == framework)
        settings = _train(first.job).settings
        checks.append(
            EquivalenceCheck(
                case=first.job.case.name,
                case_version=first.job.case_version,
                case_sha256=first.job.case.sha256,
                source_sha256=plan.source_sha256,
                settings_sha256=settings_hash(settings),
                framework=framework,
                device_type=first.job.device_type,
                precision=settings.precision,
                reference=reference.job.framework,
                reference_version=reference.started.framework_version,
                num_steps=num_steps,
                synthetic=settings.loader.synthetic,
                tolerance=TOLERANCES[settings.precision],
                jobs=tuple(compared),
                checked_at=checked_at,
            )
        )
    return checks


def _computes_as_asked(done: _Done, observer: RunObserver) -> bool:
    """Return whether a job computed in the precision of its settings; another one is compared at its own precision."""
    asked, found = _train(done.job).settings.precision, done.started.precision
    if found != asked:
        device = done.job.device_type
        observer.note(
            f"{done.job.key}: computed in {found} instead of {asked}, which it does not have on {device}: not compared"
        )
    return found == asked


def _train(job: JobSpec) -> TrainJob:
    if not isinstance(job.work, CompareJob):
        raise TypeError(f"a job of a check has work of kind {job.work.kind!r}")
    return job.work.train


def _compared(reference: _Done, other: _Done, inputs: Path, num_steps: int) -> ComparedJob:
    tolerance = TOLERANCES[_train(other.job).settings.precision]
    errors, first = compare_steps(reference.results, other.results, inputs, num_steps, tolerance)
    return ComparedJob(
        framework=other.job.framework,
        framework_version=other.started.framework_version,
        library_versions=other.started.library_versions,
        num_ranks=other.job.num_ranks,
        errors=errors,
        first_difference=first,
    )


async def _run_all(
    directory: RunDirectory,
    fetch: FetchData,
    preflight: PreflightCheck,
    observer: RunObserver,
    num_steps: int,
    num_batches: int,
) -> list[_Done]:
    launcher = create_launcher(directory.plan, directory.path)
    try:
        await preflight(directory, launcher, directory.plan.jobs, observer)
        done: list[_Done] = []
        for planned in directory.plan.jobs:
            job = _compare_job(directory, planned, num_steps, num_batches, done[0].results if done else None)
            done.append(await _run(directory, job, launcher, fetch, observer))
        return done
    finally:
        await launcher.close()


def _compare_job(
    directory: RunDirectory, planned: PlannedJob, num_steps: int, num_batches: int, reference: Path | None
) -> PlannedJob:
    train = planned.job.work
    if not isinstance(train, TrainJob):
        raise RequestError(f"{planned.job.key}: only training by AccelMark's own loop can be compared")
    work = CompareJob(
        unit=train.unit,
        units_per_sample=train.units_per_sample,
        train=train,
        inputs=directory.path / INPUTS,
        results=directory.round_dir(planned) / "results",
        reference=reference,
        num_steps=num_steps,
        num_batches=num_batches,
    )
    return planned.model_copy(update={"job": planned.job.model_copy(update={"work": work})})


async def _run(
    directory: RunDirectory, job: PlannedJob, launcher: Launcher, fetch: FetchData, observer: RunObserver
) -> _Done:
    observer.state(job, JobStatus(state="running"))
    nodes = await write_job(directory, job, launcher)
    await asyncio.to_thread(fetch, nodes[0].job, observer.note)
    state, reason = classify_job(await run_agents(launcher.agents(nodes)))
    if state != "succeeded":
        raise RunError(f"{job.job.key}: {state.replace('_', ' ')}: {reason}")
    timeline = read_timeline([log for node in node_dirs(directory.round_dir(job)) for log in node.rank_logs()])
    started = timeline.lead_end.started if timeline is not None else None
    if started is None or not isinstance(job.job.work, CompareJob):
        raise RunError(f"{job.job.key}: its log has no INIT_END")
    return _Done(job.job, started, job.job.work.results)
