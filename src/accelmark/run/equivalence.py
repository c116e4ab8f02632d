"""Execute the jobs of a check that frameworks compute the same from the same weights and batches, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from accelmark.plan.plan import Plan
from accelmark.results.equivalence import compare_steps
from accelmark.results.read.round_dir import node_dirs
from accelmark.results.rounds.timeline import read_timeline
from accelmark.run.controller.cancellation import Cancellation, run_until_signal
from accelmark.run.controller.coordinator import PreflightCheck
from accelmark.run.controller.execution import FetchData, execute_job
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.equivalence import TOLERANCES, ComparedJob, EquivalenceCheck
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import CompareJob, JobSpec, TrainJob
from accelmark.spec.log.events import Started

INPUTS: Final = "inputs"
"""Directory of a check with the initial weights and the batches."""


class _Steps(NamedTuple):
    """The steps that a job took."""

    job: JobSpec
    train: TrainJob
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

    The first job writes initial weights and batches, which all jobs read. A job that computed in another precision
    than that of its settings is not compared. Returns one check for each framework, in the order of the plan.

    Raises AccelmarkError: a host is not ready, or a job failed; its reason is given.
    """
    directory = RunDirectory.create(path, plan)

    async def take_steps() -> list[_Steps]:
        launcher = create_launcher(directory.plan, directory.path)
        try:
            await preflight(directory, launcher, directory.plan.jobs, observer)
            done: list[_Steps] = []
            for planned in directory.plan.jobs:
                train = planned.job.work
                if not isinstance(train, TrainJob):
                    raise RequestError(f"{planned.job.key}: only training by AccelMark's own loop can be compared")
                work = CompareJob(
                    unit=train.unit,
                    units_per_sample=train.units_per_sample,
                    train=train,
                    inputs=directory.path / INPUTS,
                    results=directory.round_dir(planned) / "results",
                    reference=(done[0].results if done else None),
                    num_steps=num_steps,
                    num_batches=num_batches,
                )
                job = planned.model_copy(update={"job": planned.job.model_copy(update={"work": work})})
                observer.state(job, JobStatus(state="running"))
                state, reason = await execute_job(directory, job, launcher, fetch, Cancellation(), report=observer.note)
                if state != "succeeded":
                    raise RunError(f"{job.job.key}: {state.replace('_', ' ')}: {reason}")
                timeline = read_timeline(
                    [log for node in node_dirs(directory.round_dir(job)) for log in node.rank_logs()]
                )
                started = timeline.lead_end.started if timeline is not None else None
                if started is None or not isinstance(job.job.work, CompareJob):
                    raise RunError(f"{job.job.key}: its log has no INIT_END")
                done.append(_Steps(job.job, job.job.work.train, started, job.job.work.results))
            return done
        finally:
            await launcher.close()

    reference, *others = run_until_signal(take_steps())
    compared: dict[str, list[_Steps]] = {}
    for steps in others:
        asked, used = steps.train.settings.precision, steps.started.precision
        if used == asked:
            compared.setdefault(steps.job.framework, []).append(steps)
            continue
        device = steps.job.device_type
        observer.note(
            f"{steps.job.key}: computed in {used} instead of {asked}, which it does not have on {device}: not compared"
        )
    checks = []
    for framework, jobs in compared.items():
        job, settings = jobs[0].job, jobs[0].train.settings
        tolerance = TOLERANCES[settings.precision]
        results = []
        for steps in jobs:
            errors, first = compare_steps(reference.results, steps.results, path / INPUTS, num_steps, tolerance)
            results.append(
                ComparedJob(
                    framework=framework,
                    framework_version=steps.started.framework_version,
                    library_versions=steps.started.library_versions,
                    num_ranks=steps.job.num_ranks,
                    errors=errors,
                    first_difference=first,
                )
            )
        checks.append(
            EquivalenceCheck(
                case=job.case.name,
                case_version=job.case_version,
                framework=framework,
                device_type=job.device_type,
                precision=settings.precision,
                reference=reference.job.framework,
                reference_version=reference.started.framework_version,
                num_steps=num_steps,
                synthetic=settings.loader.synthetic,
                tolerance=tolerance,
                jobs=tuple(results),
                checked_at=plan.created_at,
            )
        )
    return checks
