"""Messages between the controller of a search and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from accelmark.automl.config import TrainingConfig
from accelmark.automl.model.morphs import Morph
from accelmark.automl.model.network import Network
from accelmark.automl.model.weights import Array
from accelmark.automl.records import EpochReport, Hyperparameters, Splits, TrialOutcome, WeightMode
from accelmark.spec.model import Spec

TrainedWeights = dict[str, Array] | None


class TrialOrder(Spec):
    """One trial to run.

    ``network`` is the network to execute, hyperparameters written in. With ``parent_network`` the weights that are
    sent with the order are the parent's, and ``morphs`` lead from it to the network. ``limit_s``: remaining time when
    the worker starts.
    """

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
