"""The typed form of a search's configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from accelmark.automl.counting import Mode
from accelmark.automl.morphs import MORPH_KINDS, MorphKind, MorphLimits, WeightMode
from accelmark.automl.rules import PRESETS
from accelmark.automl.schedule import AIPERF_ROUND_EPOCHS, AIPERF_TUNING_ROUND, Schedule
from accelmark.automl.search import SearchName
from accelmark.spec.errors import nearest
from accelmark.spec.model import Spec

_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")


def _number(value: Any) -> Any:
    """Refuse yes and no, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, found {str(value).lower()}")
    return value


PositiveInt = Annotated[int, BeforeValidator(_number), Field(ge=1)]


def duration_s(value: Any) -> Any:
    """Read ``12h``, ``90m``, ``1.5h`` or ``3600s`` as seconds; a bare number is left as it is (seconds)."""
    if not isinstance(value, str):
        return _number(value)
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("is no duration: write for example 90s, 10m, 1.5h or 2d")
    return float(match[1]) * _UNIT_S[match[2]]


Duration = Annotated[float, BeforeValidator(duration_s), Field(gt=0)]


class Form(Spec):
    """A part of the configuration; its numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class DatasetConfig(Form):
    """Which pictures, and where they lie.

    The search trains and validates on the training split alone; the test split is held out for the error that is
    scored. The name says the layout and, for the rules, the data set.
    """

    name: Literal["fashion-mnist", "cifar-10", "imagenet", "arrays"] = "fashion-mnist"
    directory: Path | None = None
    """Folder of the data; for imagenet the one with train/ and val/ in it. None: found or fetched by name."""
    train_directory: Path | None = None
    held_out_directory: Path | None = None
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training split that the search validates on."""
    limit: PositiveInt | None = None
    """Use only so many training and so many held-out images: for trying things out; disclosed."""


class SearchConfig(Form):
    """Where the next network comes from, and how far networks may grow."""

    method: SearchName = "bayesian"
    morphs: Annotated[tuple[MorphKind, ...], Field(min_length=1)] = MORPH_KINDS
    max_filters: PositiveInt = 4096
    max_kernel: PositiveInt = 7
    max_nodes: PositiveInt = 1000
    max_parameters: PositiveInt | None = None
    max_forward_operations: PositiveInt | None = None
    weights: WeightMode = "carried"
    initial_weights: Path | None = None
    """Pretrained weights (.npz) of the seed network; disclosed."""

    @property
    def limits(self) -> MorphLimits:
        """The bounds on networks."""
        return MorphLimits(
            max_filters=self.max_filters,
            max_kernel=self.max_kernel,
            max_nodes=self.max_nodes,
            max_parameters=self.max_parameters,
            max_forward_operations=self.max_forward_operations,
        )


class ScheduleConfig(Form):
    """How many trials, how long, how many at a time."""

    concurrency: PositiveInt = 1
    max_trials: PositiveInt | None = None
    max_duration: Duration | None = None
    round_epochs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = AIPERF_ROUND_EPOCHS
    tuning_round: PositiveInt | None = AIPERF_TUNING_ROUND
    max_attempts: PositiveInt = 2
    early_stop: bool = True

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.max_trials is None and self.max_duration is None:
            raise ValueError("give max_trials or max_duration, or the search never ends")
        return self

    @property
    def schedule(self) -> Schedule:
        """The schedule as the state machine takes it."""
        return Schedule(
            concurrency=self.concurrency,
            max_trials=self.max_trials,
            max_s=self.max_duration,
            round_epochs=self.round_epochs,
            tuning_round=self.tuning_round,
            max_attempts=self.max_attempts,
        )


class TuningConfig(Form):
    """The space that TPE searches; an empty list or None leaves that hyperparameter as it is."""

    kernel: tuple[PositiveInt, ...] = (3, 5, 7)
    batch_size: tuple[PositiveInt, ...] = ()
    learning_rate: tuple[float, float] | None = None
    dropout: tuple[float, float] | None = None
    storage: str | None = None
    """Where the shared study lives: a URL (sqlite:, postgresql:), or None for a journal file in the run."""
    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")] | None = None
    """A study in that storage that several runs share; None: the run has its own."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.study is not None and self.storage is None:
            raise ValueError("study names a study that runs share: give storage, where it lives, too")
        if any(kernel % 2 == 0 for kernel in self.kernel):
            raise ValueError("kernels must be odd, or their output would shift")
        if 1 in self.kernel:
            raise ValueError(
                "a kernel of 1 cannot be searched: a convolution that has it sees no neighbours and is like those that"
                " only mix channels, so no later trial could make it larger again"
            )
        if self.learning_rate and not 0 < self.learning_rate[0] < self.learning_rate[1]:
            raise ValueError("learning_rate must be a range of positive numbers, low before high")
        if self.dropout and not 0 <= self.dropout[0] < self.dropout[1] < 1:
            raise ValueError("dropout must be a range within [0, 1), low before high")
        return self


class TrainingConfig(Form):
    """How one trial trains: SGD with momentum, the learning rate falling linearly over the trial."""

    batch_size: PositiveInt = 448
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    final_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    devices_per_trial: PositiveInt = 1
    stall: Duration = 600.0
    """A trial that shows no progress for so long has stalled."""


class LocalCluster(Form):
    """This machine alone."""

    kind: Literal["local"] = "local"


class AddressCluster(Form):
    """A running Ray cluster."""

    kind: Literal["address"]
    address: Annotated[str, Field(min_length=1)]


class SshCluster(Form):
    """Hosts on which we start and stop Ray ourselves; its head runs on this machine, which they must reach."""

    kind: Literal["ssh"]
    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    head_address: str | None = None
    """Address of this machine as the hosts see it; None: found out from the first connection."""
    python: str = "python3"
    """The interpreter on the hosts in whose environment Ray and this package are installed."""
    port: Annotated[int, Field(ge=1, le=65535)] = 6379
    ssh_config: Path | None = None
    """A configuration file for ssh; None: the user's own."""


ClusterConfig = Annotated[LocalCluster | AddressCluster | SshCluster, Field(discriminator="kind")]


def _known_rules(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"no rules are called that ({nearest(name, PRESETS)})")
    return name


class AutomlConfig(Form):
    """One search: network, data, how to search, schedule, training, where to run, and what it is judged by."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")] = "automl"
    seed: int = 0
    network: str = "small28"
    """A seed network's name, or the path of a network's JSON."""
    dataset: DatasetConfig = DatasetConfig()
    search: SearchConfig = SearchConfig()
    schedule: ScheduleConfig
    tuning: TuningConfig = TuningConfig()
    training: TrainingConfig = TrainingConfig()
    cluster: ClusterConfig = LocalCluster()
    counting: Mode = "accelmark"
    rules: Annotated[str, BeforeValidator(_known_rules)] = "smoke"

    @model_validator(mode="after")
    def _kernels_within_bounds(self) -> Self:
        above = [kernel for kernel in self.tuning.kernel if kernel > self.search.max_kernel]
        if above and self.schedule.tuning_round is not None:
            raise ValueError(
                f"tuning.kernel: {', '.join(map(str, above))} is above search.max_kernel, {self.search.max_kernel}:"
                " take it out, or allow it there"
            )
        return self

    @model_validator(mode="after")
    def _dealt_out_evenly(self) -> Self:
        devices = self.training.devices_per_trial
        for batch in (self.training.batch_size, *self.tuning.batch_size):
            if batch % devices:
                raise ValueError(
                    f"a batch of {batch} cannot be dealt out evenly to the {devices} devices of a trial:"
                    f" take {max(1, batch // devices) * devices} or {(batch // devices + 1) * devices}"
                )
        return self
