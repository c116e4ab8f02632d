"""The kinds of work of a job, as a union discriminated by ``kind``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat

from accelmark.spec.inference import InferPrecision, InferSettings, Note, Reference
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import ReferenceLoss, Target, Unit
from accelmark.spec.plugins.trainer import TrainerSpec
from accelmark.spec.records import ProbeItem
from accelmark.spec.settings import Precision, Scalar, TrainSettings


class BaseWork(Spec):
    """Base class of all kinds of work."""

    rank_module: ClassVar[str]
    """Module that each rank runs: ``python -m <rank_module> job.json``."""
    unit: Unit = "sample"
    """Unit of throughput."""
    units_per_sample: int = 1
    min_repeats: int = Field(default=1, ge=1)
    """Minimum number of rounds of a valid result."""

    @property
    def precision(self) -> Precision | InferPrecision:
        """Requested precision of matrix products."""
        return "fp32"

    @property
    def threads(self) -> int | None:
        """CPU threads of a rank; null: the framework chooses."""
        return None

    def for_round(self, number: int) -> Self:
        """Return the work of round ``number`` (from 1)."""
        return self


class TrainingWork(BaseWork):
    """Base class of training by AccelMark and by external trainers."""

    unit: Unit
    units_per_sample: int
    target: Target | None
    reference_loss: ReferenceLoss | None
    settings: TrainSettings

    @property
    def precision(self) -> Precision:
        """Requested precision of matrix products."""
        return self.settings.precision

    @property
    def threads(self) -> int | None:
        """CPU threads of a rank; null: the framework chooses."""
        return self.settings.threads

    def for_round(self, number: int) -> Self:
        """Return the work of round ``number``: each round has its own seed."""
        settings = self.settings.model_copy(update={"seed": self.settings.seed + number - 1})
        return self.model_copy(update={"settings": settings})


class TrainJob(TrainingWork):
    """Train a case with AccelMark's own loop."""

    rank_module: ClassVar[str] = "accelmark.train"
    kind: Literal["train"] = "train"


class ExternalJob(TrainingWork):
    """Train a case with another project's trainer, whose output is translated into PerfLog events."""

    rank_module: ClassVar[str] = "accelmark.train.external"
    kind: Literal["external"] = "external"
    trainer: TrainerSpec


class EvaluateJob(BaseWork):
    """Evaluate trained weights, replay steps from a checkpoint, or both, with the standard case and no vendor code."""

    rank_module: ClassVar[str] = "accelmark.train"
    kind: Literal["evaluate"] = "evaluate"
    train: TrainJob
    """The training job whose result is checked."""
    weights: Path | None = None
    """Checkpoint to evaluate, relative to the job's ``checkpoint_dir``; null: no evaluation."""
    checkpoint: Path | None = None
    """Checkpoint to replay from, relative to the job's ``checkpoint_dir``; null: no replay."""
    num_steps: NonNegativeInt = 0
    """Optimizer steps to replay from ``checkpoint``."""

    @property
    def precision(self) -> Precision:
        """Precision of matrix products."""
        return self.train.precision

    @property
    def threads(self) -> int | None:
        """CPU threads of a rank; null: the framework chooses."""
        return self.train.threads


class InferJob(BaseWork):
    """Run a trained model through an inference engine, in seven steps."""

    rank_module: ClassVar[str] = "accelmark.infer"
    kind: Literal["infer"] = "infer"
    unit: Unit
    metric: str
    tolerance: float
    reference: Reference | None
    settings: InferSettings
    parameters: dict[str, Scalar]
    notes: tuple[Note, ...] = ()

    @property
    def precision(self) -> InferPrecision:
        """Precision that the engine computes in."""
        return self.settings.precision

    @property
    def threads(self) -> int | None:
        """CPU threads; null: the framework chooses."""
        return self.settings.threads


class ProbeJob(BaseWork):
    """Measure the peak rates of a device or a group of devices."""

    rank_module: ClassVar[str] = "accelmark.probe"
    kind: Literal["probe"] = "probe"
    items: tuple[ProbeItem, ...] = ("matmul", "memory", "copies", "collectives")
    budget_s: PositiveFloat = 60.0
    """Approximate time budget for the measurement."""


Work = Annotated[TrainJob | InferJob | EvaluateJob | ExternalJob | ProbeJob, Field(discriminator="kind")]
"""The work of a job. Each kind has a planner in ``plan/`` and a reader in ``results/``."""
