"""The versioned schema of ``result.json`` and ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator
from pydantic.json_schema import models_json_schema

from accelmark.results.figure_names import FigureName
from accelmark.results.serving_schema import ServingRound
from accelmark.spec.job import NodeExit
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from accelmark.spec.log.inference import AnswerCheck, RepeatCheck, ScenarioResult, StageEnd
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import Target
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.settings.tuning import TrialRole, TuningSpec

_ROUNDING: Final = 1e-9

JobState = Literal["queued", "preparing", "running", "succeeded", "failed", "timed_out", "lost", "cancelled"]
Task = Literal["train", "infer", "serve", "automl"]
Mark = Literal[
    "open",
    "synthetic",
    "made_up_data",
    "partial",
    "partial_evaluation",
    "busy_machine",
    "resumed",
    "bad_samples",
    "edited",
]
"""``edited`` is not stored: readers add it where files differ from the manifest or the manifest from its signature."""


class Figure(Spec):
    """One measured figure; ``value`` may be null only with a ``reason``."""

    value: FiniteFloat | None
    reason: str | None = None
    """Why there is no value; with a value, a note about it."""

    @model_validator(mode="after")
    def _explained(self) -> Figure:
        if self.value is None and not self.reason:
            raise ValueError("a figure without a value needs a reason")
        return self


class Point(Spec):
    """A point of a curve: optimizer step, seconds of raw training time, value."""

    step: int
    time_s: float
    value: float | None


class TelemetrySeries(Spec):
    """One column of telemetry over raw training time, downsampled for charts."""

    quantity: Literal["utilisation", "memory", "power", "temperature", "clock", "cpu", "rank_memory", "host_memory"]
    unit: str
    label: str
    """Host and device, or the aggregate where there are many."""
    points: tuple[tuple[float, float | None], ...]
    """(seconds since TRAIN_START, value), negative before it; of a load since its first stage began."""


class Environment(Spec):
    """Hardware and software of a run, as read from the machine."""

    hosts: tuple[dict[str, Any], ...] = ()
    """``sys_info.json`` of each host."""
    started: dict[str, Any] = Field(default_factory=dict)
    """``INIT_END`` of rank 0: framework, device, model hash, hooks."""
    compiled: dict[str, int] = Field(default_factory=dict)
    """``COMPILED`` of rank 0: graphs and graph breaks; empty where nothing was to be compiled."""
    inspected: dict[str, Any] = Field(default_factory=dict)
    """Of earlier versions."""

    @field_validator("started")
    @classmethod
    def _named(cls, started: dict[str, Any]) -> dict[str, Any]:
        for name in ("hooks", "library_versions"):
            if not isinstance(started.get(name) or {}, dict):
                raise ValueError(f"{name} must be a mapping of names")
        return started


Verdict = Literal["VALID", "OPEN", "INVALID"]
Severity = Literal["info", "warning", "open", "error"]


class Finding(Spec):
    """One finding of the audit."""

    severity: Severity
    """``error`` makes a result INVALID, ``open`` makes it OPEN; ``warning`` and ``info`` do not change the verdict."""
    rule: str
    expected: str
    """Empty where ``actual`` needs no comparison."""
    actual: str
    round: int | None = None
    """The round that it applies to; null for all rounds."""

    def __str__(self) -> str:
        return self.about(() if self.round is None else (self.round,))

    def about(self, rounds: Sequence[int]) -> str:
        """Return the text for these rounds, or for all where none is given."""
        where = f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}: " if rounds else ""
        expected = f" (expected: {self.expected})" if self.expected else ""
        return f"{where}{self.actual}{expected} [{self.rule}]"


def finding(severity: Severity, rule: str, expected: str, actual: str, round_number: int | None = None) -> Finding:
    """Return a finding, about one round where ``round_number`` is given."""
    return Finding(severity=severity, rule=rule, expected=expected, actual=actual, round=round_number)


class ChangedKey(Spec):
    """A setting that a vendor's files changed."""

    key: str
    standard: Any
    value: Any
    layer: str


class ReplacedHook(Spec):
    """A hook that a vendor replaced."""

    name: str
    place: str
    """``file:line``."""
    num_lines: int | None


class AdaptationCost(Spec):
    """What a vendor changed for a case."""

    keys: tuple[ChangedKey, ...] = ()
    hooks: tuple[ReplacedHook, ...] = ()
    extern: dict[str, int] = Field(default_factory=dict)
    """File of the vendor's ``extern/`` -> lines of code."""
    kernels: dict[str, int] = Field(default_factory=dict)
    """File of the vendor's ``csrc/`` -> lines."""
    engines: dict[str, int] = Field(default_factory=dict)
    """File of the vendor's own inference engine -> lines of code."""
    requirements: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Variables that the vendor's script set."""
    vendor_environment: tuple[str, ...] = ()
    """Variables of ``vendor.yaml`` that differ from the shipped vendor's."""
    framework_module: str | None = None
    """The module that registers the device, where it is not the shipped vendor's."""


class CaseVerdict(Spec):
    """The verdict on a case, its findings, and what the vendor changed."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Every reason why the verdict is not VALID."""
    findings: tuple[Finding, ...]
    adaptation: AdaptationCost | None


class InferenceRound(Spec):
    """Results of an inference round besides figures."""

    compiler: str | None
    batch_size: int
    metric: str
    metric_title: str = ""
    """What the metric is, with its unit where it has one; empty: its name."""
    tolerance: float
    stages: tuple[StageEnd, ...] = ()
    """The ends of the seven steps."""
    repeat_check: RepeatCheck | None = None
    answers: AnswerCheck | None = None
    """Null where the engine's answers were not compared."""
    isolated: bool = False
    """Whether the engine had a process of its own; False in runs of earlier versions."""
    crossing_share: float | None = None
    """Part of the measured windows outside of the calls, by the clock of the engine's process."""
    scenarios: tuple[ScenarioResult, ...] = ()
    latency_curve: tuple[tuple[float, float], ...] = ()
    """(share of the full batches, latency in ms that they do not exceed), for charts."""


class RankTime(Spec):
    """Where a rank's time went, as means over its steps in ms; without the first steps of each attempt."""

    rank: int
    host: str
    step_ms: FiniteFloat
    """With the wait for data."""
    data_wait_ms: FiniteFloat
    own_ms: FiniteFloat
    """Computation up to its last gradient."""
    wait_ms: FiniteFloat
    """Wait for other ranks: the rest of its step, less the least rest of any rank, which is exchange and update."""

    @property
    def busy_ms(self) -> float:
        """Time until the other ranks could go on."""
        return self.data_wait_ms + self.own_ms


class Straggler(Spec):
    """The rank that the others wait for most."""

    rank: int
    host: str
    share: FiniteFloat
    """Its time beyond the median of the other ranks, as a share of a step."""
    cause: Literal["data", "computation"]
    """What takes it longer than the others."""
    is_whole_host: bool
    """Whether its host has several ranks, and all are slower than those of other hosts by more than the limit."""


class RankTimes(Spec):
    """Where the time of all ranks went."""

    ranks: tuple[RankTime, ...]
    straggler: Straggler | None
    """null where no rank costs more than 2 % of a step."""


class RoundResult(Spec):
    """One round of one case."""

    schema_version: Literal[1] = 1
    key: CaseKey
    task: Task
    round: int
    case_version: int
    unit: str
    state: JobState
    reason: str | None
    """What happened and what to do; null where the state is ``succeeded``."""
    converged: bool | None
    target: Target | None = None
    marks: tuple[Mark, ...] = ()
    vendor: str
    chip: Chip | None = None
    precision: str
    started_at: str
    figures: dict[FigureName, Figure]
    curves: dict[str, tuple[Point, ...]] = Field(default_factory=dict)
    """``loss``, ``throughput`` and one for each metric; downsampled for charts, not used for figures."""
    step_ms_histogram: tuple[tuple[float, int], ...] = ()
    """(upper edge in ms, steps); the first entry is the lower edge of the first bin, with no steps."""
    telemetry: tuple[TelemetrySeries, ...] = ()
    num_steps: int = 0
    """Optimizer steps completed."""
    num_samples: int = 0
    """Samples processed by all ranks."""
    num_devices: int = 1
    min_rounds: int = 1
    """Rounds that the case requires for a valid result."""
    role: TrialRole | None = None
    """Its part in a search for the best settings; null in other runs."""
    inference: InferenceRound | None = None
    """null for other tasks."""
    serving: ServingRound | None = None
    """null for other tasks."""
    rank_times: RankTimes | None = None
    """null with one rank, and where the own part of the steps of all ranks is not known."""
    rank_times_unknown: str | None = None
    """Why ``rank_times`` is null where there are several ranks."""
    nodes: tuple[NodeExit, ...] = ()
    environment: Environment = Environment()
    settings: dict[str, Provenance] = Field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def metric_title(self) -> str | None:
        """What the case's metric is; None for tasks without one."""
        if self.inference is not None:
            return self.inference.metric_title or self.inference.metric.replace("_", " ")
        return self.target.metric.replace("_", " ") if self.target is not None else None

    def value_of(self, name: FigureName) -> float | None:
        """Return the value of a figure; None where it was not measured."""
        found = self.figures.get(name)
        return found.value if found is not None else None


class Spread(Spec):
    """A figure aggregated over rounds."""

    mean: FiniteFloat | None
    stdev: FiniteFloat | None
    ci95: tuple[FiniteFloat, FiniteFloat] | None
    """Student's t interval of the mean; null for fewer than two rounds."""
    num_rounds: int
    rounds_needed: int | None = None
    """Rounds needed for an interval within 1 % of the mean, at the standard deviation so far."""
    reason: str | None = None

    @property
    def half95(self) -> float | None:
        """Half of the 95 % interval."""
        return None if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2

    @property
    def relative_half95(self) -> float | None:
        """Half of the 95 % interval relative to the mean; a rounding error of equal values is 0."""
        return None if self.half95 is None or not self.mean else relative_half(self.half95, self.mean)


def relative_half(half: float, mean: float) -> float:
    """Return half of an interval relative to the mean; a rounding error of equal values is 0."""
    share = half / abs(mean)
    return share if share > _ROUNDING else 0.0


class CaseResult(Spec):
    """All rounds of one key."""

    key: CaseKey
    task: Task
    unit: str
    variant: str | None = None
    """Distinguishes cases of one key: engine, precision and batch size, or server and precision."""
    role: TrialRole | None = None
    """Its part in a search for the best settings; null in other runs."""
    state: JobState
    """``succeeded`` only if every round did."""
    converged: bool | None
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    figures: dict[FigureName, Spread]
    rounds: tuple[str, ...]
    """Directories of the rounds, relative to the run."""
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    """All findings of the audit, with those of the rounds; they determine the verdict."""
    adaptation: AdaptationCost | None = None
    """What the vendor changed; null where no round has a job.json."""

    def mean_of(self, name: FigureName) -> float | None:
        """Return the mean of a figure; None where it was not measured."""
        found = self.figures.get(name)
        return found.mean if found is not None else None

    @property
    def num_rounds(self) -> int:
        """Rounds that succeeded and have figures."""
        return max((spread.num_rounds for spread in self.figures.values()), default=0)


class Summary(Spec):
    """``summary.json``: the results of all cases of a run."""

    schema_version: Literal[1] = 1
    accelmark_version: str
    run: str
    started_at: str
    finished_at: str
    state: JobState
    vendor: str
    cases: tuple[CaseResult, ...]
    tuning: TuningSpec | None = None
    """The declaration of a search for the best settings; null for other runs."""
    problems: tuple[str, ...] = ()
    """Files that could not be read."""

    @property
    def measured(self) -> list[CaseResult]:
        """The cases but trials of a search for the best settings."""
        return [case for case in self.cases if case.role != "trial"]


def json_schema() -> str:
    """Return the JSON schema of ``result.json`` and ``summary.json`` as text (``schemas/result.json``)."""
    _, definitions = models_json_schema(
        [(RoundResult, "serialization"), (Summary, "serialization")],
        title="AccelMark results",
        description="result.json is a RoundResult, summary.json a Summary.",
    )
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | definitions
    schema["anyOf"] = [{"$ref": "#/$defs/RoundResult"}, {"$ref": "#/$defs/Summary"}]
    return json.dumps(schema, indent=2) + "\n"
