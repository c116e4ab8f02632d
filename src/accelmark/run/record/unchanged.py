"""Whether what a run was planned with is still the same: a resumed run never mixes figures of different code."""

from __future__ import annotations

from pathlib import Path

import accelmark
from accelmark.plan.plan import Plan
from accelmark.spec.catalog import find, tree_hash
from accelmark.spec.errors import AccelmarkError, Problem, SpecError


def refuse_changed(plan: Plan, where: str) -> None:
    """Do nothing where cases, vendor and AccelMark itself are as they were planned.

    Raises:
        SpecError: with everything that has changed since.
    """
    hint = "start a new run"
    problems: list[Problem] = []
    folders = {ref.path: ref.sha256 for job in plan.jobs for ref in (job.job.case, job.job.extern) if ref is not None}
    for path, sha256 in folders.items():
        if not path.is_dir():
            problems.append(Problem(where, str(path), "is gone since the run was planned", hint))
        elif tree_hash(path) != sha256:
            problems.append(Problem(where, str(path), "has changed since the run was planned", hint))
    try:
        vendor = find("vendors", plan.vendor).path
    except AccelmarkError as error:
        problems.append(Problem(where, plan.vendor, str(error)))
    else:
        if tree_hash(vendor) != plan.vendor_sha256:
            problems.append(Problem(where, str(vendor), "has changed since the run was planned", hint))
    if tree_hash(Path(accelmark.__file__).parent) != plan.source_sha256:
        problems.append(Problem(where, "AccelMark", "has changed since the run was planned", hint))
    if problems:
        raise SpecError(problems)
