"""A standard case: ``cases/<model>/case.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from accelmark.spec.errors import nearest
from accelmark.spec.layers import flatten, setting_defaults
from accelmark.spec.model import Spec
from accelmark.spec.settings.inference import CaseClass, InferCaseSpec
from accelmark.spec.settings.serving import ServeCaseSpec
from accelmark.spec.settings.training import TrainSettings

Family = Literal["vision", "language", "speech", "recommendation", "generation", "graph", "multimodal"]
Unit = Literal["image", "token", "sequence", "sample"]
_UNITS: Final = frozenset({"units_per_sample", "units_per_sample_key"})
MUTABLE_GROUPS: Final = {
    "batch": ("batch_size", "eval_batch_size", "gradient_accumulation_steps"),
    "execution": ("precision", "parallelism", "compile", "activation_checkpointing", "attention", "optimizer.fused"),
    "batch_recipe": ("optimizer.lr", "schedule.warmup_steps", "evaluate.every_steps"),
}
"""Names in ``mutable`` -> the settings that they allow."""


class Target(Spec):
    """Convergence target: a metric and the value that it must reach in an evaluation."""

    metric: str
    """Name of a metric that the case's evaluation returns."""
    direction: Literal["at_least", "at_most"]
    """Whether the metric must be at least or at most ``value``."""
    value: float
    """Value of the metric that ends the benchmark successfully."""
    why: str
    """Source of the value."""

    def reached(self, metric: float) -> bool:
        """Return whether ``metric`` meets the target; NaN never does."""
        return metric >= self.value if self.direction == "at_least" else metric <= self.value

    @property
    def text(self) -> str:
        """The target in words: ``accuracy ≥ 0.75``."""
        return f"{self.metric.replace('_', ' ')} {'≥' if self.direction == 'at_least' else '≤'} {self.value:g}"


REFERENCE_FILE: Final = "reference_loss.yaml"
"""In a case's folder: a :class:`ReferenceLoss` that ``accelmark train CASE --write-reference`` wrote."""


class ReferenceLoss(Spec):
    """Convergence by a reference loss curve: a limit on the mean relative error of the losses."""

    steps: tuple[PositiveInt, ...] = Field(min_length=1)
    """Optimizer steps of the reference curve."""
    loss: tuple[FiniteFloat, ...]
    """Mean losses over all ranks at these steps."""
    max_mean_relative_error: PositiveFloat = 0.02
    """Largest accepted mean of ``|loss - reference| / reference``."""
    source: str
    """Run or publication that the curve comes from."""
    samples_per_step: PositiveInt | None = None
    """Samples of an optimizer step over all ranks, which a compared run has to have too; null: any number."""
    data: dict[str, str] = Field(default_factory=dict)
    """Data set -> fingerprint of the data that was trained on."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """All settings of the measured run, by dotted key."""

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if len(self.steps) != len(self.loss) or list(self.steps) != sorted(set(self.steps)):
            raise ValueError("steps have to increase, with one loss each")
        return self

    def applies(self, samples_per_step: int) -> bool:
        """Whether the losses of a run with this many samples in an optimizer step can be compared."""
        return self.samples_per_step in (None, samples_per_step)


def expanded_mutable(listed: tuple[str, ...], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names of mutable settings with groups expanded; raises ValueError for a name that is no setting."""
    mutable = tuple(name for entry in listed for name in MUTABLE_GROUPS.get(entry, (entry,)))
    known = {*setting_defaults(TrainSettings), *flatten(settings)}
    sections = {*MUTABLE_GROUPS, *(key.rpartition(".")[0] for key in known)} - {""}
    unknown = [entry for entry in mutable if not any(f"{key}.".startswith(f"{entry}.") for key in known)]
    if unknown := [entry for entry in unknown if settings or not entry.startswith("model.")]:
        named = (f"names {entry!r}, which is no setting ({nearest(entry, known | sections)})" for entry in unknown)
        raise ValueError("; ".join(named))
    return mutable


class TrainCaseSpec(Spec):
    """The training side of a case."""

    unit: Unit
    """Unit of throughput."""
    units_per_sample: int = Field(default=1, ge=1)
    """Units in one sample, for example tokens in a sequence."""
    units_per_sample_key: str | None = None
    """Key under ``model`` with the units in a sample instead; by default ``seq_length`` for tokens."""
    target: Target | None = None
    reference_loss: ReferenceLoss | None = None
    calibration: tuple[float, ...] = ()
    """The target's metric at the end of the reference training, one value per seed; empty where it was not measured."""
    samples_to_target: tuple[int, ...] = ()
    """Samples until the first evaluation that reached the target in the same training, one value per seed."""
    made_up_data: bool = False
    """Whether a program made up the data, so that results are marked: they say nothing about real data."""
    min_repeats: int = Field(default=1, ge=1)
    """Minimum number of rounds of a valid result."""
    settings: dict[str, Any]
    """Defaults of :class:`accelmark.spec.settings.training.TrainSettings`, for every framework."""
    classes: dict[str, CaseClass] = Field(default_factory=dict)
    """Framework -> the class that trains, in place of a file of the framework."""
    arrays: tuple[str, ...] = ()
    """Frameworks in which the folder's ``arrays.py`` trains, with the framework's layers."""
    frameworks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Framework -> settings that it uses in place of ``settings``, where it cannot use those."""
    reduced: dict[str, Any] = Field(default_factory=dict)
    """Settings of a model so small that it trains a few steps on any machine; tests and campaigns use them."""
    zero_gradients: tuple[str, ...] = ()
    """Ends of PyTorch's names of weights with a gradient of rounding alone, which ``check case`` does not compare."""
    mesh: dict[Annotated[str, Field(pattern="^(tp|pp|cp|ep)$")], tuple[str, ...]] = Field(default_factory=dict)
    """Axes of a mesh along which the model can be split -> the keys under ``model`` that their degree divides."""
    mutable: tuple[str, ...]
    """Settings that may be changed; ``a`` allows ``a.*``; ``batch``, ``execution``, ``batch_recipe`` are groups."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_of_a_sequence(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("unit") == "token" and not _UNITS & given.keys():
            return {**given, "units_per_sample_key": "seq_length"}
        return given

    @field_validator("mutable")
    @classmethod
    def _names_settings(cls, listed: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return expanded_mutable(listed, info.data.get("settings", {}))

    def settings_of(self, framework: str) -> dict[str, Any]:
        """Return the case's settings in a framework."""
        return {**self.settings, **self.frameworks.get(framework, {})}


class CaseSpec(Spec):
    """A standard workload: its data, target, and mutable settings."""

    name: str
    """Name of the folder and of the model in keys."""
    version: int = Field(ge=1)
    """Incremented when results stop being comparable with earlier ones."""
    title: str
    """One line for tables and pages."""
    description: str
    """The model that is trained or inferred, its data, and its gate."""
    licence: str
    """Licence of the model definition and any packaged weights."""
    family: Family | None = None
    """Kind of the model's data; ``accelmark cases --family`` selects by it."""
    size: Literal["mini", "standard"]
    """``mini`` runs on two CPU cores in minutes; ``standard`` is sized for an accelerator."""
    data: tuple[str | dict[str, Any], ...] = ()
    """Data sets and weights: the name of a known one, or an ``accelmark.datasets.DatasetSpec``."""
    requires: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Requirements in addition to the framework's: a list for all frameworks, or a list by framework."""
    train: TrainCaseSpec | None = None
    infer: InferCaseSpec | None = None
    serve: ServeCaseSpec | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the case describes: ``train``, ``infer``, ``serve``."""
        sides = {"train": self.train, "infer": self.infer, "serve": self.serve}
        return tuple(task for task, side in sides.items() if side is not None)

    def requires_for(self, framework: str) -> tuple[str, ...]:
        """Return the case's own requirements with a framework."""
        return self.requires.get(framework, ()) if isinstance(self.requires, dict) else self.requires

    @property
    def all_data(self) -> tuple[str | dict[str, Any], ...]:
        """``data``, and the known data sets that only inference or serving names."""
        named = [name for side in (self.infer, self.serve) if side is not None for name in side.data]
        return (*self.data, *(name for name in dict.fromkeys(named) if name not in self.data_names))

    @property
    def data_names(self) -> tuple[str, ...]:
        """Names of the data sets, in order."""
        return tuple(entry if isinstance(entry, str) else str(entry.get("name")) for entry in self.data)
