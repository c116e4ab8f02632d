"""Rules about the rounds of a run: as many as planned, as the run was registered before it started."""

from __future__ import annotations

from typing import Any, Final

from accelmark.audit.evidence import Evidence, Findings
from accelmark.results.schema import finding
from accelmark.spec.secret import LEFT_OUT

_MAX_LISTED: Final = 5


def planned_rounds(evidence: Evidence) -> Findings:
    """Check that the plan has the rounds that its key states, with a seed of their own each."""
    jobs = sorted(evidence.planned, key=lambda job: int(job.get("round") or 0))
    if not jobs:
        return
    numbers = [job.get("round") for job in jobs]
    repeat = (jobs[0].get("key") or {}).get("repeat", 1)
    if numbers != list(range(1, repeat + 1)):
        actual = f"plan.json has the rounds {', '.join(map(str, numbers))}"
        yield finding("error", "rounds-planned", f"rounds 1 to {repeat}, as the key states", actual)
    seeds = [_seed(job) for job in jobs]
    expected = [seeds[0] + at for at in range(len(seeds))] if isinstance(seeds[0], int) else seeds
    if seeds != expected:
        yield finding("error", "rounds-planned", "seeds that count the rounds", f"seeds {', '.join(map(str, seeds))}")
    if evidence.not_planned:
        actual = f"events.jsonl has {', '.join(evidence.not_planned)}, which plan.json does not have"
        yield finding("error", "rounds-planned", "the rounds that were carried out", actual)


def _seed(job: dict[str, Any]) -> Any:
    work = job.get("work") or {}
    return (work.get("settings") or {}).get("seed") if work.get("kind") == "train" else None


def registered(evidence: Evidence) -> Findings:
    """Check that the plan is the one that was registered, and list earlier runs of the same work."""
    entry, plan = evidence.registration, evidence.plan_file
    if entry is None or plan is None:
        return
    # Bundling removes secrets from the plan.
    if plan.sha256 != entry.plan_sha256 and LEFT_OUT not in plan.text:
        expected = f"the plan that was registered before the start, hash {entry.plan_sha256[:12]}"
        yield finding("error", "plan-registered", expected, f"plan.json has hash {plan.sha256[:12]}")
    if entry.number is None:
        yield finding("info", "run-registered", "", f"the run is in no registry: {entry.reason}")
    elif entry.earlier:
        listed = ", ".join(f"number {one.number} ({one.ended or 'no end'})" for one in entry.earlier[-_MAX_LISTED:])
        count = len(entry.earlier)
        actual = f"number {entry.number} in the registry; {count} earlier of the same work, the last: {listed}"
        yield finding("info", "run-registered", "", actual)
