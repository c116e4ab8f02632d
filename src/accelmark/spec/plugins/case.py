"""A standard case: ``cases/<model>/case.yaml``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat

from accelmark.spec.inference import InferCaseSpec
from accelmark.spec.model import Spec

Unit = Literal["image", "token", "sequence", "sample"]


class Target(Spec):
    """What a training run has to reach at an evaluation to count as converged."""

    metric: str
    """Name of a metric that the case's evaluation returns."""
    direction: Literal["at_least", "at_most"]
    value: float
    why: str
    """Where the value comes from."""

    def reached(self, metric: float) -> bool:
        """Return whether ``metric`` meets the target; NaN never does."""
        return metric >= self.value if self.direction == "at_least" else metric <= self.value


class ReferenceLoss(Spec):
    """Convergence by a reference loss curve: the mean relative error against it stays under a limit."""

    steps: tuple[int, ...]
    loss: tuple[float, ...]
    max_mean_relative_error: PositiveFloat = 0.02
    source: str


class TrainCaseSpec(Spec):
    """The training side of a case."""

    unit: Unit
    """What throughput counts."""
    units_per_sample: int = Field(default=1, ge=1)
    """Units in one sample, for example tokens in a sequence."""
    units_per_sample_key: str | None = None
    """The key under ``model`` with the units in a sample instead, for example ``seq_length``."""
    target: Target | None = None
    reference_loss: ReferenceLoss | None = None
    min_repeats: int = Field(default=1, ge=1)
    """Rounds that a result needs to be valid."""
    settings: dict[str, Any]
    """Defaults of :class:`accelmark.spec.settings.TrainSettings`, for every framework."""
    mutable: tuple[str, ...]
    """Dotted settings that a vendor, a run file or the command line may change; ``a`` allows all of ``a.*``."""


class CaseSpec(Spec):
    """A standard workload, its data, target and what may be changed of it."""

    name: str
    version: int = Field(ge=1)
    """Raised whenever results stop being comparable with earlier ones."""
    title: str
    description: str
    licence: str
    """Licence of the model definition and any packaged weights."""
    size: Literal["mini", "standard"]
    """``mini`` runs on two CPU cores in minutes; ``standard`` wants an accelerator."""
    data: tuple[str | dict[str, Any], ...] = ()
    """Data sets and weights: the name of a known one, or an ``accelmark.datasets.DatasetSpec``."""
    requires: tuple[str, ...] = ()
    """Packages that it needs, besides those of its framework, as requirements."""
    train: TrainCaseSpec | None = None
    infer: InferCaseSpec | None = None

    @property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data sets, in order."""
        return tuple(entry if isinstance(entry, str) else str(entry.get("name")) for entry in self.data)
