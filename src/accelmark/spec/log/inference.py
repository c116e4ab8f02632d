"""The values of the events of inference."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from accelmark.spec.log.events import FinishedBase, StartedBase
from accelmark.spec.model import Spec
from accelmark.spec.settings.inference import InferStep, ScenarioName
from accelmark.spec.settings.training import Scalar

Phase = Literal["validation", "inference"]

InferEndReason = Literal[
    "completed", "corrupt_model", "incompatible_engine", "unsupported_operator", "wrong_shape", "bad_data",
    "out_of_memory", "engine_missing", "bad_request", "cancelled", "error",
]  # fmt: skip


class InferStarted(StartedBase):
    """The value of ``INIT_END`` of inference."""

    compiler: str | None
    isolated: bool = False
    """Whether the engine runs in a separate process and its answers are compared."""
    counts_own_memory: bool = False
    """Whether memory on a CPU counts the processes that compute; otherwise it counts the host."""


class StageBegin(Spec):
    """The value of ``STAGE_BEGIN``."""

    step: InferStep
    number: int
    engine: str | None = None


class StageEnd(Spec):
    """The value of ``STAGE_END``: one of the seven steps ended or was skipped."""

    step: InferStep
    number: int
    state: Literal["done", "skipped", "failed"]
    duration_s: float
    reason: str | None = None
    details: dict[str, Scalar] = Field(default_factory=dict)


class WarmUp(Spec):
    """The value of ``WARMUP``: calls before measuring; only the duration of the first is a figure."""

    phase: Phase
    first_call_ms: float
    calls_ms: tuple[float, ...]


class ForwardWindow(Spec):
    """The value of ``FORWARD``: ``log_freq`` batches; each tuple has one entry per batch."""

    phase: Phase
    pass_number: int
    items: tuple[int, ...]
    latency_ms: tuple[float, ...]
    """Computation with copies to and from the device, without the time declared as not inference."""
    not_inference_ms: tuple[float, ...]
    wall_ms: float
    nonfinite_batches: int
    crossing_ms: float | None = None
    """The window by the rank's clock minus its calls by that of the engine's process; null for the framework."""
    computed_ms: float | None = None
    """Duration of all calls where several are computed at the same time; null: they add up to it."""
    planned_items: int | None = None


class InferEvaluation(Spec):
    """The value of ``EVALUATE``: the metrics of one phase over all its items."""

    phase: Phase
    num_items: int
    metrics: dict[str, float | None]
    """Empty for synthetic data or untrained weights."""


class RepeatCheck(Spec):
    """The value of ``REPEAT_CHECK``: whether the same items again are faster than fresh ones."""

    fresh_ms: float | None
    same_ms: float | None
    speedup: float | None
    """Median over batches of the first call over the median of the third to the fifth."""
    chance: float | None = None
    """Upper bound on the probability of these times for an engine without a cache."""
    limit: float
    suspicious: bool
    """True if ``speedup`` exceeds ``limit`` and ``chance`` is at most 0.002."""
    num_batches: int
    reason: str | None = None


class AnswerCheck(Spec):
    """The value of ``ANSWER_CHECK``: answers against the framework's in fp32; errors are relative Euclidean norms."""

    num_items: int
    median_error: float | None
    worst_error: float | None
    top1_agreement: float | None
    """Share of answers with the framework's largest value; null for outputs without a ranking."""
    sensitivity: float | None = None
    """Share of the framework's reaction to a small change of the input that the engine shows; null if not tried."""
    num_not_compared: int = 0
    framework_metrics: dict[str, float | None] = Field(default_factory=dict)
    """Metrics of the framework's answers to the inputs of the first pass, which differ slightly from the data's."""
    engine_metrics: dict[str, float | None] = Field(default_factory=dict)
    num_scored: int = 0
    seed: int | None = None
    """Seed of the perturbations and the order, drawn after the compilation."""


class ScenarioResult(Spec):
    """The value of ``SCENARIO``: one LoadGen scenario."""

    scenario: ScenarioName
    valid: bool
    functional: bool
    """True if the run was shorter than MLPerf requires, so that its figure is not comparable with a submission."""
    figure: float | None
    """Offline: samples/s; SingleStream and MultiStream: latency in ms at the percentile; Server: highest QPS."""
    figure_name: Literal["samples_per_second", "latency_p90_ms", "latency_p99_ms", "queries_per_second"]
    latency_bound_ms: float | None = None
    latencies_ms: dict[str, float]
    tried: tuple[tuple[float, bool], ...] = ()
    log_dir: str
    reason: str | None = None
    crossing_us: float | None = None
    """Median duration of a message to the engine's process and its reply, which every call includes."""
    accuracy_answers: AnswerCheck | None = None
    performance_answers: AnswerCheck | None = None
    """A sample of the calls in performance mode, among them the first of each size."""
    repeat_check: RepeatCheck | None = None
    """Whether the items of the library are faster than new ones, after all queries."""


class InferFinished(FinishedBase):
    """The value of ``FINISHED`` of inference."""

    end_reason: InferEndReason
    failed_step: InferStep | None = None
    vendor: str
    compiler: str | None
    precision: str
    batch_size: int
    flops: float | None
    p_validation_whole: float | None
    """Items per second, here and below."""
    p_validation_core: float | None
    p_inference_whole: float | None
    p_inference_core: float | None
    val_average_acc: float | None
    infer_average_acc: float | None
    compile_time: float | None
    valid: bool
    invalid_reasons: tuple[str, ...]
