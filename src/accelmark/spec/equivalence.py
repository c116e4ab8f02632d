"""The record of a check that frameworks compute the same, its tolerances, and the files that its jobs exchange."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from accelmark.spec.model import Spec
from accelmark.spec.settings.training import Precision

INITIAL_FILE: Final = "initial.safetensors"


def batches_file(step: int) -> str:
    """Return the name of the file with the batches of a step, from 1: ``<batch>/<array>``."""
    return f"batches-{step:04d}.safetensors"


def results_file(step: int, rank: int | str) -> str:
    """Return the name of the file with a rank's results of a step: outputs, and on rank 0 loss and weights."""
    return f"step-{step:04d}-rank{rank}.safetensors"


class Errors(Spec):
    """Differences between two jobs, or their limits. All are relative, so that they have no unit."""

    outputs: float
    """Largest difference of an output, over the root mean square of the batch's outputs."""
    loss: float
    weights: float
    """Euclidean norm of a parameter's difference, over the norm of its change in the step."""


TOLERANCES: Final[dict[Precision, Errors]] = {
    "fp32": Errors(outputs=1e-3, loss=1e-4, weights=5e-2),
    "bf16": Errors(outputs=1e-1, loss=1e-2, weights=3e-1),
}
"""Limits of an equivalent job: ``docs/reference/equivalence.md`` has what was measured."""


class Difference(Spec):
    """The first step where a job exceeds the tolerance."""

    step: int
    what: str
    """``outputs of batch 0``, ``loss``, or the name of a weight."""
    error: float
    limit: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} differs by {self.error:.2g} (tolerance {self.limit:.2g})"


class ComparedJob(Spec):
    """One job of a check, compared with the reference job."""

    framework: str
    framework_version: str
    library_versions: dict[str, str]
    num_ranks: int
    errors: Errors
    first_difference: Difference | None


class EquivalenceCheck(Spec):
    """``accelmark check case NAME --frameworks ...`` of one framework at one precision on one kind of device."""

    schema_version: Literal[1] = 1
    case: str
    case_version: int
    framework: str
    device_type: str
    precision: Precision
    reference: str
    reference_version: str
    num_steps: int = Field(ge=1)
    synthetic: bool
    tolerance: Errors
    jobs: tuple[ComparedJob, ...] = Field(min_length=1)
    checked_at: str

    @property
    def equivalent(self) -> bool:
        """Whether all jobs are within the tolerance."""
        return all(job.first_difference is None for job in self.jobs)
