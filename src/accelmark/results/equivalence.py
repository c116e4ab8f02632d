"""Compare the first optimizer steps of two jobs, and describe a check of frameworks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from accelmark.spec.equivalence import INITIAL_FILE, Difference, EquivalenceCheck, Errors, results_file
from accelmark.spec.errors import RunError

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


class _Error(NamedTuple):
    kind: str
    what: str
    value: float


def compare_steps(
    reference: Path, other: Path, initial: Path, num_steps: int, tolerance: Errors
) -> tuple[Errors, Difference | None]:
    """Return the largest errors of a job over all steps, and the first difference beyond the tolerance.

    ``reference`` and ``other`` are directories with results of steps; ``initial`` has :data:`INITIAL_FILE`.
    Raises RunError if a file is missing or damaged.
    """
    from accelmark.spec.tensor_file import read_tensors  # imports NumPy, which reading results does not need

    before = read_tensors(initial / INITIAL_FILE)
    largest = dict.fromkeys(Errors.model_fields, 0.0)
    first: Difference | None = None
    for step in range(1, num_steps + 1):
        expected = _results(reference, step)
        errors = list(_step_errors(expected, _results(other, step), before))
        before = {name.partition("/")[2]: array for name, array in expected.items() if not name.startswith("outputs/")}
        for error in errors:
            largest[error.kind] = max(largest[error.kind], error.value)
        first = first or _first_difference(step, errors, tolerance)
    return Errors(**largest), first


def _results(directory: Path, step: int) -> dict[str, Array]:
    from accelmark.spec.tensor_file import read_tensors

    tensors: dict[str, Array] = {}
    for path in sorted(directory.glob(results_file(step, "*"))):
        tensors |= read_tensors(path)
    if not tensors:
        raise RunError(f"{directory}: has no results of step {step}")
    return tensors


def _first_difference(step: int, found: list[_Error], tolerance: Errors) -> Difference | None:
    """Return the worst error of the first kind that is beyond its limit, in the order in which a step computes them."""
    for kind in Errors.model_fields:
        limit: float = getattr(tolerance, kind)
        worst = max((error for error in found if error.kind == kind), key=lambda error: error.value)
        if not worst.value <= limit:
            return Difference(step=step, what=worst.what, error=worst.value, limit=limit)
    return None


def _step_errors(
    expected: Mapping[str, Array], found: Mapping[str, Array], before: Mapping[str, Array]
) -> Iterator[_Error]:
    """Yield the errors of one step; statistics are compared where both jobs wrote them."""
    import numpy as np

    names = [name for name in expected if name in found or not name.startswith("statistics/")]
    weights = [name for name in names if name.startswith("weights/")]
    for name in names:
        kind, _, own = name.partition("/")
        right, left = expected[name].astype(np.float64), found.get(name)
        if left is None or left.shape != right.shape:
            yield _Error(kind if kind in ("outputs", "loss") else "weights", own or kind, FAR)
            continue
        apart = left.astype(np.float64) - right
        if kind == "outputs":
            scale = float(np.sqrt(np.mean(np.square(right))))
            yield _Error(kind, f"outputs of batch {own}", _ratio(float(np.abs(apart).max()), scale))
        elif kind == "loss":
            yield _Error(kind, kind, _ratio(abs(float(apart)), abs(float(right))))
        else:
            changed = float(np.linalg.norm(right - before[own]))
            least = _LEAST_CHANGE * float(np.linalg.norm(right))
            yield _Error("weights", own, _ratio(float(np.linalg.norm(apart)), max(changed, least)))
    if not weights:
        raise RunError("the reference job wrote no weights")


def _ratio(over: float, under: float) -> float:
    value = over / under if under else (0.0 if not over else FAR)
    return value if value == value and value <= FAR else FAR
