"""Continue a search for the best settings: add its next trial, or its last rounds, to the plan of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from accelmark.audit.verdict import audit_case
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.plan.tuning import settings_of, with_trial, with_tuned_rounds
from accelmark.results.figures import FigureName
from accelmark.results.schema import RoundResult
from accelmark.results.store.loaded_run import RESULT_FILE, load_round
from accelmark.results.tuning import is_eligible
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.registry import register_plan
from accelmark.run.record.states import JobStatus
from accelmark.spec.errors import RunError
from accelmark.spec.settings.tuning import TuningSpec, identity, next_trial


def add_next_jobs(directory: RunDirectory, statuses: Mapping[str, JobStatus]) -> bool:
    """Add the next jobs of a search to the plan of its run, and register it; returns whether there are new jobs.

    Does nothing for other runs.
    """
    if directory.plan.tuning is None:
        return False
    earlier = directory.plan
    plan = continued(earlier, directory.path, statuses)
    if plan is not earlier:
        directory.replace_plan(plan)
    register_plan(directory.path)  # also what an interrupted coordinator had not
    return plan is not earlier


def continued(plan: Plan, run_dir: Path, statuses: Mapping[str, JobStatus]) -> Plan:
    """Return the plan of a search with its next jobs; ``plan`` itself while a trial is due, or at its end."""
    tried = [job for at, job in enumerate(plan.jobs) if at == 0 or job.job.role == "trial"]
    if plan.tuning is None or any(job.job.role == "tuned" for job in plan.jobs):
        return plan
    if not all(statuses[job.directory].ended for job in tried):
        return plan
    results: dict[str, RoundResult] = {}
    for job in tried:
        with suppress(RunError):
            results[job.directory] = load_round(run_dir / job.directory / RESULT_FILE)
    tuning = plan.tuning
    scores = {identity(settings_of(job)): _score(run_dir, job, results.get(job.directory), tuning) for job in tried}
    shipped, best = settings_of(tried[0]), max(tried, key=lambda job: scores[identity(settings_of(job))])
    took_s = [sum(node.duration_s for node in result.nodes) for result in results.values()]
    # Another trial and the last rounds may take as long as the longest trial.
    needed_s = sum(took_s) + (tuning.num_least_rounds - 1) * max(took_s, default=0.0)
    has_trials = tuning.max_trials is None or len(tried) <= tuning.max_trials
    if has_trials and (tuning.budget_s is None or needed_s <= tuning.budget_s):
        proposed = next_trial(shipped, tuning.choices, scores)
        if proposed is not None:
            return with_trial(plan, proposed)
    return plan if best is tried[0] else with_tuned_rounds(plan, settings_of(best))


def _score(run_dir: Path, job: PlannedJob, result: RoundResult | None, tuning: TuningSpec) -> float:
    """Return the logarithm of the figure, negative where less is better; minus infinity for an invalid trial."""
    figure = result.value_of(FigureName(tuning.figure)) if result is not None else None
    if result is None or not figure or figure <= 0:
        return -math.inf
    if not is_eligible(result.state, audit_case(run_dir, {job.directory: result}, 1).findings):
        return -math.inf
    return math.log(figure) * (1 if tuning.better == "higher" else -1)
