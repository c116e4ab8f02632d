"""Find the check of frameworks that applies to a round, and describe it."""

from __future__ import annotations

from typing import Final

from accelmark.results.schema import Finding, finding
from accelmark.spec.equivalence import EquivalenceCheck
from accelmark.spec.job import JobSpec
from accelmark.spec.log.events import Started

EQUIVALENCE_RULE: Final = "numerical-equivalence"


def equivalence_finding(job: JobSpec, started: Started | None) -> Finding | None:
    """Return what a check found about a round's framework, settings, device and versions; None if none applies.

    A round with a vendor's code, of another version of the framework or its libraries, or at another precision was not
    checked.
    """
    if started is None or job.has_vendors_code:
        return None
    for check in job.equivalence:
        if _applies(check, started):
            return finding("info" if check.equivalent else "warning", EQUIVALENCE_RULE, "", describe(check))
    return None


def _applies(check: EquivalenceCheck, started: Started) -> bool:
    seen = (started.framework, started.device_type, started.precision)
    if seen != (check.framework, check.device_type, check.precision):
        return False
    versions = (started.framework_version, started.library_versions)
    return all((job.framework_version, job.library_versions) == versions for job in check.jobs)


def describe(check: EquivalenceCheck) -> str:
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
