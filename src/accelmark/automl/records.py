"""What a run writes down about its trials and epochs: the facts that scores are computed from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from accelmark.automl.morphs import Morph, WeightMode

TrialStatus = Literal["running", "finished", "cut", "crashed", "diverged", "stalled", "lost", "out-of-memory"]
"""finished: to its last epoch or its early stop; cut: ended by the run's own end; the others gave no result."""

RETRIED: tuple[TrialStatus, ...] = ("crashed", "stalled", "lost", "out-of-memory")
"""Ends that may not come again."""

FAILURES: tuple[TrialStatus, ...] = (*RETRIED, "diverged")
"""Ends without a result. What diverged would diverge again: it is skipped."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Record(BaseModel):
    """What all records share."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Hyperparameters(Record):
    """What one trial is trained with; ``kernel`` None leaves the network's own kernels alone."""

    batch_size: Annotated[int, Field(ge=1)]
    learning_rate: Annotated[float, Field(gt=0)]
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    kernel: Annotated[int, Field(ge=1)] | None = None


class EpochRecord(Record):
    """One epoch, or the part of one that was done when the trial was ended.

    Times are seconds on the run's clock, which starts with the run and stands still while the run is dead. Images are
    those really processed. ``complete`` is False for a part.
    """

    trial: Count
    attempt: Annotated[int, Field(ge=1)] = 1
    epoch: Annotated[int, Field(ge=1)]
    begun_s: NonNegative
    ended_s: NonNegative
    trained_images: Count
    evaluated_images: Count
    steps: Count
    training_s: NonNegative
    evaluating_s: NonNegative
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: Share | None
    complete: bool


class OperationCost(Record):
    """Operations of one network in one counting mode: per image, and per optimiser step."""

    forward: Count
    backward: Count
    evaluation: Count
    update: Count

    def of(self, epoch: EpochRecord) -> int:
        """Return the operations that an epoch took."""
        return (
            (self.forward + self.backward) * epoch.trained_images
            + self.evaluation * epoch.evaluated_images
            + self.update * epoch.steps
        )


class TrialRecord(Record):
    """One trial: what was trained, how, where, and what became of it.

    From the training driver's record: ``precision`` that was computed in, ``ranks`` in step, ``trained_images`` over
    all of them, ``flops_per_image``
    (matrix work of the model that was built, forward and backward, by ``torch.utils.flop_counter``), ``computing_s``
    (of training steps alone, without waiting for data), ``peak_memory_mib`` of rank 0's device. None where it has none.
    """

    trial: Count
    individual: Count
    round: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=1)]
    worker: Count
    parent: Count | None
    morphs: tuple[Morph, ...]
    hyperparameters: Hyperparameters
    tuned: bool
    weights: WeightMode
    epochs_planned: Annotated[int, Field(ge=1)]
    cost: OperationCost
    parameters: Count
    started_s: NonNegative
    ended_s: NonNegative | None = None
    status: TrialStatus = "running"
    reason: str = ""
    predicted_accuracy: float | None = None
    held_out_accuracy: Share | None = None
    held_out_s: NonNegative = 0.0
    precision: str | None = None
    device: str | None = None
    host: str | None = None
    ranks: Annotated[int, Field(ge=1)] | None = None
    trained_images: Count | None = None
    flops_per_image: NonNegative | None = None
    computing_s: NonNegative | None = None
    peak_memory_mib: NonNegative | None = None
