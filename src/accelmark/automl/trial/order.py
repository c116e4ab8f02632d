"""What a trial is told to do and what it reports back: plain data, so that any worker can carry it out."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from accelmark.automl.config import TrainingConfig
from accelmark.automl.graph import Network
from accelmark.automl.morphs import Morph, WeightMode, with_dropout, with_kernel
from accelmark.automl.records import Hyperparameters, Record

Array = NDArray[np.float32]


class TrialOrder(Record):
    """One trial to carry out.

    ``network`` is what is to be executed, hyperparameters already written into it. With ``parent_network``, the
    weights that come along are the parent's, and ``morphs`` lead from it to the network. ``limit_s`` is the time
    that is left, counted from when the worker begins.
    """

    trial: int
    individual: int
    attempt: int
    round: int
    network: Network
    parent_network: Network | None
    morphs: tuple[Morph, ...]
    hyperparameters: Hyperparameters
    training: TrainingConfig
    epochs: Annotated[int, Field(ge=1)]
    early_stop: bool
    seed: int
    limit_s: float | None


class EpochReport(Record):
    """One epoch as the worker saw it; ``begun_s`` and ``ended_s`` count from the trial's beginning."""

    epoch: int
    begun_s: float
    ended_s: float
    trained_images: int
    evaluated_images: int
    steps: int
    training_s: float
    evaluating_s: float
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    complete: bool


TrialEnd = Literal["finished", "cut", "crashed", "diverged", "out-of-memory"]


class TrialResult(Record):
    """How a trial ended on its worker.

    ``executed`` is the digest of the network that was really built and run; the score is counted from it. From
    ``precision`` on, all is what the training driver recorded (see :class:`TrialRecord`).
    """

    status: TrialEnd
    reason: str = ""
    executed: str | None = None
    weights: WeightMode = "from-scratch"
    held_out_accuracy: float | None = None
    held_out_s: float = 0.0
    seconds: float = 0.0
    precision: str | None = None
    device: str | None = None
    host: str | None = None
    ranks: int = 1
    trained_images: int | None = None
    flops_per_image: float | None = None
    computing_s: float | None = None
    peak_memory_mib: float | None = None


class Listener(Protocol):
    """Whom a trial tells what it does."""

    def progress(self, images: int) -> None:
        """Take note that so many images more were processed."""
        ...

    def epoch(self, report: EpochReport) -> None:
        """Take in an epoch that is done, or the part of one before a cut."""
        ...

    def should_stop(self) -> bool:
        """Tell whether the trial is to end now."""
        ...


class TrialExecutor(Protocol):
    """Trains one network on one set of devices."""

    def run(
        self, order: TrialOrder, weights: dict[str, Array] | None, listener: Listener
    ) -> tuple[TrialResult, dict[str, Array] | None]:
        """Carry out an order; return how it ended and the best epoch's weights.

        A trial that fails says so in its result; only a broken worker raises.
        """
        ...


def digest(network: Network) -> str:
    """Return the SHA-256 of a network's layers and connections, whatever its name."""
    return hashlib.sha256(network.model_dump_json(exclude={"name"}).encode()).hexdigest()


def executed_network(network: Network, hyperparameters: Hyperparameters) -> Network:
    """Return the network as these hyperparameters have it executed."""
    if hyperparameters.kernel is not None:
        network = with_kernel(network, hyperparameters.kernel)
    if hyperparameters.dropout is not None:
        network = with_dropout(network, hyperparameters.dropout)
    return network
