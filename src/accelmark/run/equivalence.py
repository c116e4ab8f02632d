"""Execute the jobs of a check that frameworks compute the same from the same weights and batches, and compare them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from accelmark.plan.plan import Plan
from accelmark.results.read.round_dir import node_dirs
from accelmark.results.rounds.timeline import read_timeline
from accelmark.run.controller.coordinator import PreflightCheck
from accelmark.run.controller.execution import Cancellation, FetchData, execute_job, run_until_signal
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.equivalence import (
    INITIAL_FILE,
    TOLERANCES,
    ComparedJob,
    Difference,
    EquivalenceCheck,
    Errors,
    results_file,
)
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import CompareJob, JobSpec, TrainJob
from accelmark.spec.log.events import Started
from accelmark.spec.plugins.catalog import load_case

if TYPE_CHECKING:
    from accelmark.spec.tensor_file import Array


def check_text(check: EquivalenceCheck) -> str:
    """Return one sentence with verdict, scope, tolerance and date of a check."""
    ranks = " and ".join(str(job.num_ranks) for job in check.jobs)
    unit = "rank" if ranks == "1" else "ranks"
    scope = f"{check.num_steps} steps in {check.precision} on {ranks} {unit}, checked {check.checked_at[:10]}"
    reference = f"{check.reference} {check.reference_version}"
    for job in check.jobs:
        if job.first_difference is not None:
            where = "one rank" if job.num_ranks == 1 else f"{job.num_ranks} ranks"
            return f"not numerically equivalent to {reference}: {job.first_difference} on {where}; {scope}"
    limits = ", ".join(f"{name} {limit:g}" for name, limit in check.tolerance.model_dump().items())
    return f"numerically equivalent to {reference} (tolerance: {limits}; {scope})"


FAR: Final = sys.float_info.max
"""The error of values that cannot be compared: other shapes, or not finite. JSON has no infinity."""
_LEAST_CHANGE: Final = 1e-3
"""Smallest change of a parameter, as a share of its norm; fp32 rounds smaller changes away."""


def compare_steps(
    reference: Path, other: Path, initial: Path, num_steps: int, tolerance: Errors, zero_gradients: tuple[str, ...] = ()
) -> tuple[Errors, Difference | None]:
    """Return the largest errors of a job over all steps, and the first difference beyond the tolerance.

    ``reference`` and ``other`` are directories with results of steps; ``initial`` has :data:`INITIAL_FILE`.
    Weights whose names end with one of ``zero_gradients`` are not compared.
    Raises RunError if a file is missing or damaged.
    """
    from accelmark.spec.tensor_file import read_tensors  # imports NumPy, which reading results does not need

    before = read_tensors(initial / INITIAL_FILE)
    largest = dict.fromkeys(Errors.model_fields, 0.0)
    first: Difference | None = None
    for step in range(1, num_steps + 1):
        expected, found = _results(reference, step), _results(other, step)
        errors = [error for error in _step_errors(expected, found, before) if not error[1].endswith(zero_gradients)]
        before = {name.partition("/")[2]: array for name, array in expected.items() if not name.startswith("outputs/")}
        for kind in Errors.model_fields:  # in the order in which a step computes them
            of_kind = [(what, value) for error_kind, what, value in errors if error_kind == kind]
            what, value = max(of_kind, key=lambda error: error[1], default=("", 0.0))
            limit: float = getattr(tolerance, kind)
            largest[kind] = max(largest[kind], value)
            if first is None and not value <= limit:
                first = Difference(step=step, what=what, error=value, limit=limit)
    return Errors(**largest), first


def _results(directory: Path, step: int) -> dict[str, Array]:
    from accelmark.spec.tensor_file import read_tensors

    tensors: dict[str, Array] = {}
    for path in sorted(directory.glob(results_file(step, "*"))):
        tensors |= read_tensors(path)
    if not tensors:
        raise RunError(f"{directory}: has no results of step {step}")
    return tensors


def _step_errors(
    expected: Mapping[str, Array], found: Mapping[str, Array], before: Mapping[str, Array]
) -> Iterator[tuple[str, str, float]]:
    """Yield kind, name and size of the errors of one step; statistics are compared where both jobs wrote them."""
    import numpy as np

    names = [name for name in expected if name in found or not name.startswith("statistics/")]
    if not any(name.startswith("weights/") for name in names):
        raise RunError("the reference job wrote no weights")
    for name in names:
        kind, _, own = name.partition("/")
        right, left = expected[name].astype(np.float64), found.get(name)
        if left is None or left.shape != right.shape:
            yield kind if kind in ("outputs", "loss") else "weights", own or kind, FAR
            continue
        apart = left.astype(np.float64) - right
        if kind == "outputs":
            scale = float(np.sqrt(np.mean(np.square(right))))
            yield kind, f"outputs of batch {own}", _ratio(float(np.abs(apart).max()), scale)
        elif kind == "loss":
            yield kind, kind, _ratio(abs(float(apart)), abs(float(right)))
        else:
            changed = float(np.linalg.norm(right - before[own]))
            least = _LEAST_CHANGE * float(np.linalg.norm(right))
            yield "weights", own, _ratio(float(np.linalg.norm(apart)), max(changed, least))


def _ratio(over: float, under: float) -> float:
    value = over / under if under else (0.0 if not over else FAR)
    return value if value == value and value <= FAR else FAR


INPUTS: Final = "inputs"
"""Directory of a check with the initial weights and the batches."""


class _Steps(NamedTuple):
    job: JobSpec
    work: CompareJob
    started: Started


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
        async with create_launcher(directory.plan, directory.path) as launcher:
            await preflight(launcher, directory.plan.jobs, observer)
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
                    reference=(done[0].work.results if done else None),
                    num_steps=num_steps,
                    num_batches=num_batches,
                )
                job = planned.model_copy(update={"job": planned.job.model_copy(update={"work": work})})
                observer.state(job, JobStatus(state="running"))
                state, reason = await execute_job(job, launcher, fetch, Cancellation(), report=observer.note)
                if state != "succeeded":
                    raise RunError(f"{job.job.key}: {state.replace('_', ' ')}: {reason}")
                logs = [log for node in node_dirs(directory.round_dir(job)) for log in node.rank_logs()]
                timeline = read_timeline(logs)
                started = timeline.lead.end.started if timeline is not None else None
                if started is None or not isinstance(job.job.work, CompareJob):
                    raise RunError(f"{job.job.key}: its log has no INIT_END")
                done.append(_Steps(job.job, job.job.work, started))
            return done

    reference, *others = run_until_signal(take_steps())
    compared: dict[str, list[_Steps]] = {}
    for steps in others:
        asked, used = steps.work.train.settings.precision, steps.started.precision
        if used == asked:
            compared.setdefault(steps.job.framework, []).append(steps)
            continue
        device = steps.job.device_type
        observer.note(
            f"{steps.job.key}: computed in {used} instead of {asked}, which it does not have on {device}: not compared"
        )
    train = load_case(reference.job.case.name).train
    zero_gradients = () if train is None else train.zero_gradients
    checks = []
    for framework, jobs in compared.items():
        job, settings = jobs[0].job, jobs[0].work.train.settings
        tolerance = TOLERANCES[settings.precision]
        results = []
        for steps in jobs:
            places = (reference.work.results, steps.work.results, path / INPUTS)
            errors, first = compare_steps(*places, num_steps, tolerance, zero_gradients)
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
