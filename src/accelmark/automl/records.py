"""Records of networks, trials and epochs, from which scores are computed, and messages to and from workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from accelmark.automl.config import AutomlConfig, TrainingConfig, WeightMode
from accelmark.automl.model.counting import NetworkCount
from accelmark.automl.model.graph import Network
from accelmark.automl.model.morphs import Morph, with_dropout, with_kernel
from accelmark.automl.model.weights import Array
from accelmark.spec.model import Spec

TrialStatus = Literal["running", "finished", "cut", "crashed", "diverged", "stalled", "lost", "out-of-memory"]
"""``accelmark explain`` has the meaning of each; those other than ``finished`` and ``cut`` have no result."""

RETRIED: tuple[TrialStatus, ...] = ("crashed", "stalled", "lost", "out-of-memory")

FAILURES: tuple[TrialStatus, ...] = (*RETRIED, "diverged")
"""Ends without a result. A trial that diverged would diverge again and is not retried."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Hyperparameters(Spec):
    """Hyperparameters of one trial; ``kernel`` and ``dropout`` None keep the network's own."""

    batch_size: Annotated[int, Field(ge=1)]
    learning_rate: Annotated[float, Field(gt=0)]
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    kernel: Annotated[int, Field(ge=1)] | None = None

    @staticmethod
    def of(training: TrainingConfig) -> Hyperparameters:
        """Return those of a trial that is not tuned."""
        return Hyperparameters(batch_size=training.batch_size, learning_rate=training.learning_rate)

    def applied_to(self, network: Network) -> Network:
        """Return the network that is executed with these hyperparameters."""
        if self.kernel is not None:
            network = with_kernel(network, self.kernel)
        return network if self.dropout is None else with_dropout(network, self.dropout)


IndividualStatus = Literal["pending", "observed", "lost"]


class Individual(Spec):
    """A proposed network; ``value`` is reached or predicted accuracy on the validation split.

    ``morphs`` lead from the network of ``parent`` to this one. ``point`` is its place in the space of a sampler,
    ``round`` that of successive halving, ``epochs`` the length of a last training.
    """

    id: int
    network: Network
    parent: int | None = None
    morphs: tuple[Morph, ...] = ()
    status: IndividualStatus = "pending"
    value: float | None = None
    point: dict[str, int] | None = None
    round: Annotated[int, Field(ge=1)] = 1
    epochs: Annotated[int, Field(ge=1)] | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Key of an order by value, where of equal individuals the earlier one is better."""
        return self.value or 0.0, -self.id


def plan_of(config: AutomlConfig, trial: int, individual: Individual) -> tuple[int, int, bool]:
    """Return an individual's round, epochs, and whether its hyperparameters are searched."""
    number = individual.round if config.search.method == "halving" else trial // config.schedule.concurrency + 1
    epochs, is_tuned = config.schedule.plan(number)
    return number, individual.epochs or epochs, is_tuned


class EpochReport(Spec):
    """One epoch, or with ``complete`` False the part of it before a cut; seconds since the trial's start."""

    epoch: Annotated[int, Field(ge=1)]
    begun_s: NonNegative
    ended_s: NonNegative
    trained_images: Count
    evaluated_images: Count
    steps: Count
    training_s: NonNegative
    evaluating_s: NonNegative
    data_wait_s: NonNegative = 0.0
    """The part of ``training_s`` in which a rank had no batch."""
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: Share | None
    complete: bool


class EpochRecord(EpochReport):
    """An epoch of a trial's attempt. The run's clock starts with the run and stops while no controller runs."""

    trial: Count
    attempt: Annotated[int, Field(ge=1)] = 1


@dataclass(slots=True)
class Totals:
    """Sums over the epochs of one attempt; ``epochs`` includes one that was cut, ``complete`` does not."""

    epochs: int = 0
    complete: int = 0
    trained_images: int = 0
    evaluated_images: int = 0
    steps: int = 0
    training_s: float = 0.0
    evaluating_s: float = 0.0
    data_wait_s: float = 0.0
    length_s: float = 0.0
    ended_s: float = 0.0
    accuracy: float | None = None

    def add(self, epoch: EpochReport) -> None:
        """Add an epoch."""
        self.epochs += 1
        self.complete += epoch.complete
        self.trained_images += epoch.trained_images
        self.evaluated_images += epoch.evaluated_images
        self.steps += epoch.steps
        self.training_s += epoch.training_s
        self.evaluating_s += epoch.evaluating_s
        self.data_wait_s += epoch.data_wait_s
        self.length_s += epoch.ended_s - epoch.begun_s
        self.ended_s = max(self.ended_s, epoch.ended_s)
        if epoch.validation_accuracy is not None:
            self.accuracy = max(self.accuracy or 0.0, epoch.validation_accuracy)


class OperationCost(Spec):
    """Operations of one network in one counting mode: per image, ``update`` per optimizer step."""

    forward: Count
    backward: Count
    evaluation: Count
    update: Count

    @staticmethod
    def of(counted: NetworkCount) -> OperationCost:
        """Return the cost of a counted network."""
        return OperationCost.model_validate(counted, from_attributes=True)

    def operations(self, work: EpochReport | Totals) -> int:
        """Return the operations of an epoch, or of the totals of several."""
        trained = (self.forward + self.backward) * work.trained_images
        return trained + self.evaluation * work.evaluated_images + self.update * work.steps


class TrialOutcome(Spec):
    """The result of a trial as its worker reported it; None where the training driver recorded nothing.

    ``trained_images`` are over all ranks, ``flops_per_image`` the matrix work of the built model, forward and backward.
    """

    reason: str = ""
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


class TrialRecord(TrialOutcome):
    """One attempt of a trial: what was trained, how, where, and its result. Times are on the run's clock."""

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
    predicted_accuracy: float | None = None

    def epoch(self, report: EpochReport) -> EpochRecord:
        """Return the record of an epoch of this attempt, on the run's clock."""
        times = {"begun_s": self.started_s + report.begun_s, "ended_s": self.started_s + report.ended_s}
        return EpochRecord(**report.model_dump() | times, trial=self.trial, attempt=self.attempt)

    def updated(self, **changes: object) -> TrialRecord:
        """Return a validated copy with changes."""
        return TrialRecord.model_validate(self.model_dump() | changes)


class Splits(Spec):
    """Number of images in each split of the data as the workers opened it, and of classes."""

    training: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=1)]
    held_out: Annotated[int, Field(ge=1)]
    classes: Annotated[int, Field(ge=1)]


TrainedWeights = dict[str, Array] | None


class TrialOrder(Spec):
    """One trial to run; weights are those of ``parent_network``, from which ``morphs`` lead to ``network``."""

    round: int
    network: Network
    parent_network: Network | None = None
    morphs: tuple[Morph, ...] = ()
    hyperparameters: Hyperparameters
    training: TrainingConfig
    epochs: Annotated[int, Field(ge=1)]
    early_stop: bool
    seed: int
    limit_s: float | None = None


class TrialResult(TrialOutcome):
    """The end of a trial on its worker; ``executed`` is the digest of the network that was built."""

    status: Literal["finished", "cut", "crashed", "diverged", "out-of-memory"]
    executed: str | None = None
    weights: WeightMode = "from-scratch"
    seconds: float = 0.0


Progress = int | EpochReport
"""The number of further processed images, or a finished epoch or the part of one before a cut."""


class TrialListener(NamedTuple):
    """Receives the progress of a trial, and returns whether to end it now; the defaults ignore it and never end it."""

    report: Callable[[Progress], None] = lambda progress: None
    should_stop: Callable[[], bool] = lambda: False


class WorkerReady(NamedTuple):
    """A worker, or its replacement, is ready for a trial; the data that it opened."""

    fingerprint: str
    identity: str
    splits: Splits
    host: str = "this machine"


class TrialEnded(NamedTuple):
    """A trial ended, with the weights of its best epoch."""

    result: TrialResult
    weights: TrainedWeights


class WorkerLost(NamedTuple):
    """A worker and its trial are lost."""

    status: Literal["lost", "out-of-memory"]
    reason: str


Message = Progress | TrialEnded | WorkerLost | WorkerReady
