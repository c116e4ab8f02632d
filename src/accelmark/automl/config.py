"""Configuration of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from accelmark.automl.model.counting import Mode
from accelmark.automl.model.morphs import MORPH_KINDS, MorphKind, MorphLimits
from accelmark.spec.errors import nearest
from accelmark.spec.layers import flatten
from accelmark.spec.model import FiniteSpec
from accelmark.spec.number_format import DURATION, duration_s
from accelmark.spec.rules import RulesOfSearch

WeightMode = Literal["carried", "from-scratch"]
SearchName = Literal["bayesian", "random", "evolution", "tpe", "anneal", "smac", "batch", "halving", "none"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")]
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
_WrittenDuration = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=rf"^{DURATION}$")]
Duration = Annotated[
    float, BeforeValidator(duration_s, json_schema_input_type=_WrittenDuration), Field(gt=0, strict=True)
]
_REPORTS_PER_S: Final = 32.0
"""Reports of all workers together."""


def report_interval_s(workers: int) -> float:
    """Return the seconds after which each of so many workers reports, where no epoch ended before."""
    return min(max(0.5, workers / _REPORTS_PER_S), 30.0)


class DatasetConfig(FiniteSpec):
    """Images and their place. The test split is held out for the scored error; the search uses the training split."""

    name: Literal["fashion-mnist", "cifar-10", "imagenet", "arrays"] = "fashion-mnist"
    """Data set; ``arrays`` reads one ``.npz`` file of the user."""
    directory: Path | None = None
    """Directory of the data; for imagenet the parent of train/ and val/. None: fetched by name."""
    train_directory: Path | None = None
    """Directory of the training images; null: ``train`` in ``directory``."""
    held_out_directory: Path | None = None
    """Directory of the held-out images; null: ``val`` in ``directory``."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training split that the search validates on."""
    limit: PositiveInt | None = None
    """Use only this many training and held-out images, to test the set-up; disclosed."""


class SearchConfig(MorphLimits):
    """Search method and bounds on networks."""

    method: SearchName = "bayesian"
    """How networks are proposed: ``bayesian``, ``random`` and ``evolution`` morph; ``tpe``, ``anneal``, ``smac`` and
    ``batch`` sample widths and depths of stages; ``halving`` trains the best third of a round longer; ``none`` trains
    the seed network only."""
    morphs: Annotated[tuple[MorphKind, ...], Field(min_length=1)] = MORPH_KINDS
    """Morphs that may be applied."""
    weights: WeightMode = "carried"
    """``carried``: a morphed network starts from its parent's weights."""
    initial_weights: Path | None = None
    """Pretrained weights of the seed network (.npz, or Keras' .h5 of ResNet-50); disclosed."""


class ScheduleConfig(FiniteSpec):
    """Number and length of trials; those that run when ``max_duration`` has passed are cut.

    A round is ``concurrency`` trials. ``round_epochs`` are the epochs of trials of the first, second ... round; the
    last entry is for all later rounds. Hyperparameters are searched from ``tuning_round`` on; None: never.
    """

    concurrency: PositiveInt = 1
    """Trials that run at the same time."""
    max_trials: PositiveInt | None = None
    """Retries are not counted."""
    max_duration: Duration | None = None
    """Time from the first trial's start, as seconds or a text such as ``1h``; null: no limit."""
    max_operations: PositiveInt | None = None
    """Operations of all trials that gave a result; no trial starts that would exceed them. null: no limit."""
    final_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of ``max_operations``, else of ``max_duration``, for a last training of the best networks, one a worker;
    null: there is none."""
    round_epochs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (15, 30, 45, 60)
    """Epochs of a trial in each round."""
    tuning_round: PositiveInt | None = 4
    """Round from which hyperparameters are tuned too; null: never."""
    max_attempts: PositiveInt = 2
    """Attempts at a trial whose worker died."""
    early_stop: bool = True
    """End a trial whose curve stopped improving."""

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.max_trials is None and self.max_duration is None and self.max_operations is None:
            raise ValueError("the search never ends: give max_trials, max_duration or max_operations")
        if self.final_share is not None and (self.max_trials or not (self.max_operations or self.max_duration)):
            raise ValueError("final_share is a share of max_operations or max_duration: give one, and no max_trials")
        return self

    def plan(self, number: int) -> tuple[int, bool]:
        """Return the epochs of a trial of round ``number`` (from 1), and whether its hyperparameters are searched."""
        epochs = self.round_epochs[min(number, len(self.round_epochs)) - 1]
        return epochs, self.tuning_round is not None and number >= self.tuning_round


class TuningConfig(FiniteSpec):
    """The space that TPE searches; an empty list or None: not searched."""

    kernel: tuple[PositiveInt, ...] = (3, 5, 7)
    """Kernel sizes that are tried."""
    batch_size: tuple[PositiveInt, ...] = ()
    """Batch sizes that are tried; empty: not tuned."""
    learning_rate: tuple[float, float] | None = None
    """Range of learning rates; null: not tuned."""
    dropout: tuple[float, float] | None = None
    """Range of dropout rates; null: not tuned."""
    seed_trials: Annotated[int, Field(ge=0, strict=True)] = 0
    """Trials at the start that search hyperparameters for the seed network; all others take the best ones. 0: every
    trial searches, from ``tuning_round`` on."""
    storage: str | None = None
    """URL of a shared study (sqlite:, postgresql:); None: a file in the run."""
    study: Name | None = None
    """Name of a study in that storage that several runs share; None: the run's own."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.study is not None and self.storage is None:
            raise ValueError("study names a shared study: also give its storage")
        if any(kernel % 2 == 0 or kernel == 1 for kernel in self.kernel):
            raise ValueError("kernels must be odd, else the output is shifted, and above 1, else none can be enlarged")
        if self.learning_rate and not 0 < self.learning_rate[0] < self.learning_rate[1]:
            raise ValueError("learning_rate must be a range of positive numbers, low before high")
        if self.dropout and not 0 <= self.dropout[0] < self.dropout[1] < 1:
            raise ValueError("dropout must be a range within [0, 1), low before high")
        return self


class TrainingConfig(FiniteSpec):
    """Training of one trial: SGD with momentum; the learning rate falls linearly over the trial."""

    batch_size: PositiveInt = 448
    """Samples of one optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate."""
    final_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the trial."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of SGD."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the label's probability spread over all classes."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of matrix products and convolutions."""
    devices_per_trial: PositiveInt = 1
    """Devices that train one trial together."""
    stall: Duration = 600.0
    """A trial without progress for this long is stalled."""


class LocalCluster(FiniteSpec):
    """This machine."""

    kind: Literal["local"] = "local"
    """Ray is started on this machine."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of Ray and the trials, as those that choose devices."""


class AddressCluster(FiniteSpec):
    """A running Ray cluster."""

    kind: Literal["address"]
    """An existing cluster is used."""
    address: Annotated[str, Field(min_length=1)]
    """Address of its head: ``10.0.0.1:6379``."""


class SshCluster(FiniteSpec):
    """Hosts on which the search starts and stops Ray; its head runs on this machine, which they must reach."""

    kind: Literal["ssh"]
    """Ray is started over SSH."""
    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Host names, as OpenSSH's configuration knows them."""
    head_address: str | None = None
    """Address of this machine for the hosts; None: the source address of a route to the first host."""
    python: str = "python3"
    """The hosts' Python interpreter, in whose environment Ray and PyTorch are installed."""
    port: Annotated[int, Field(ge=1, le=65535)] = 6379
    """Port of Ray's head."""
    ssh_config: Path | None = None
    """Configuration file of OpenSSH's client; None: ``~/.ssh/config``."""
    work_directory: Path = Path("/var/tmp/accelmark")  # noqa: S108
    """Where AccelMark is delivered to on the hosts."""
    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Host -> variables of its Ray and its trials, as those that choose devices."""
    init_script: Path | None = None
    """Shell script at this path on every host, which bash reads before Ray starts there."""

    @field_validator("hosts")
    @classmethod
    def _are_distinct(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"host {', '.join(twice)} is listed twice")
        return hosts


class AutomlConfig(FiniteSpec):
    """One search: network, data, method, schedule, training, cluster and rules."""

    name: Name = "automl"
    """Name of the search, part of its directory's name."""
    seed: int = 0
    """Seed of proposals, initial weights and shuffling."""
    network: str = "small28"
    """Name of a seed network, or path of a network's JSON."""
    dataset: DatasetConfig = DatasetConfig()
    search: SearchConfig = SearchConfig()
    schedule: ScheduleConfig
    tuning: TuningConfig = TuningConfig()
    training: TrainingConfig = TrainingConfig()
    cluster: Annotated[LocalCluster | AddressCluster | SshCluster, Field(discriminator="kind")] = LocalCluster()
    counting: Mode = "accelmark"
    """Rule by which operations are counted."""
    rules: RulesOfSearch = Field(default="smoke", validate_default=True)
    """``aiperf-v1``: AIPerf's published rules; ``smoke``: almost none; or the path of a file with rules."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if unknown := sorted(self.rules.pinned.keys() - (known := self.by_key()).keys()):
            hint = nearest(unknown[0], known)
            raise ValueError(f"rules {self.rules.name}: pinned.{unknown[0]}: unknown key ({hint})")
        if self.search.method == "halving" and self.schedule.tuning_round not in (None, 1):
            raise ValueError("schedule.tuning_round: halving keeps the hyperparameters of a network: write 1 or null")
        interval_s, stall_s = report_interval_s(self.schedule.concurrency), self.training.stall
        if stall_s < 2 * interval_s:
            what = f"each of {self.schedule.concurrency} workers reports every {interval_s:g} s"
            raise ValueError(f"training.stall: {what}: {stall_s:g} s is too short, take at least {2 * interval_s:g} s")
        if self.tuning.seed_trials and self.schedule.tuning_round != 1:
            raise ValueError("tuning.seed_trials are the first trials: write schedule.tuning_round: 1")
        limit, devices = self.search.max_kernel, self.training.devices_per_trial
        above = ", ".join(str(kernel) for kernel in self.tuning.kernel if kernel > limit)
        if above and self.schedule.tuning_round is not None:
            raise ValueError(f"tuning.kernel: {above} is above search.max_kernel, {limit}: change one of them")
        for batch in (self.training.batch_size, *self.tuning.batch_size):
            if batch % devices:
                raise ValueError(f"a batch of {batch} cannot be divided evenly among the {devices} devices of a trial")
        return self

    def by_key(self) -> dict[str, Any]:
        """Return the values by dotted key, without those of the rules."""
        return flatten(self.model_dump(mode="json", exclude={"rules"}))
