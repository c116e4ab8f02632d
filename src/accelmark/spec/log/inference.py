"""Inference and serving: the values of their events, and the records of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import Field

from accelmark.spec.log.events import FinishedBase, StartedBase
from accelmark.spec.model import Spec
from accelmark.spec.settings.inference import Benchmark, InferStep, ScenarioName
from accelmark.spec.settings.serving import StageArrival, TokenScenario
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


RequestStatus = Literal["ok", "http_error", "malformed", "dropped", "timed_out", "cancelled"]

REQUESTS_FILE: Final = "requests.jsonl"
"""In the node's directory: a :class:`RequestRecord` on each line, in the order in which requests ended."""
ANSWERS_FILE: Final = "answers.jsonl"
SCORES_FILE: Final = "scores.jsonl"


class RequestRecord(Spec):
    """One request as the client saw it. Times are in seconds of the client's monotonic clock since its stage began."""

    stage: int
    """Stage from 0; -1 for warm-up."""
    number: int
    prompt: int
    due_s: float
    """When it was due; latencies count from here."""
    sent_s: float | None = None
    """When its last byte was given to the kernel; null where no connection was made."""
    first_s: float | None = None
    end_s: float
    """Arrival of the end of the response, or when the request was given up."""
    gaps_us: tuple[int, ...] = ()
    """Microseconds between arrivals of outputs, from the first to the last. An output may have several tokens."""
    status: RequestStatus
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    """Tokens of the prompt, counted with the model's own tokenizer; null without one."""
    output_tokens: int | None = None
    requested_tokens: int
    usage_input: int | None = None
    usage_output: int | None = None
    queue_s: float | None = None
    """Time in the server's queue before it began the request; null where the server does not state it."""
    text_sha256: str | None = None


class Answer(Spec):
    """An answer under load beside the framework's greedy answer to the same prompt."""

    stage: int
    number: int
    prompt: int
    num_tokens: int
    num_agreeing: int


class BenchmarkScore(Spec):
    """Accuracy of a served or offline model in a task of lm-evaluation-harness."""

    task: Benchmark
    metric: str
    value: float
    stderr: float | None
    num_questions: int
    limit: int | None
    num_fewshot: int
    task_version: str
    harness_version: str


class StartTimes(Spec):
    """What it took until a model could answer: the server, or the framework in the process that compares answers."""

    cpu_s: float
    """CPU time of all processes, with the conversion of the model."""
    wall_s: float


class ServeStarted(StartedBase):
    """The value of ``INIT_END`` of serving; framework, version and device are the server's."""

    server: str | None
    endpoint: str
    command: tuple[str, ...] = ()
    served_model: str
    start_s: float | None
    """From the start of the server to its first healthy answer; null for an endpoint."""
    start: StartTimes | None = None
    num_devices: int
    weights_sha256: str | None
    """Over names and contents of the model's files; null for an endpoint."""
    has_tokenizer: bool
    server_cores: tuple[int, ...] = ()
    """Cores of the server; the client has cores to itself. Empty where both use all cores."""
    client_cores: tuple[int, ...] = ()


class StageLoad(Spec):
    """One stage of the load: what it offered, and how its client kept up."""

    stage: int
    arrival: StageArrival
    concurrency: int | None
    rate: float | None
    """Requests per second of an open load; null for a closed one and for a trace."""
    is_search: bool = False
    scenario: TokenScenario | None = None
    input_tokens: int | None = None
    """Lengths of prompts and answers of the stage; null where ``prompts`` states them."""
    output_tokens: int | None = None
    duration_s: float
    num_requests: int
    lag_p50_ms: float | None = None
    """How late the client's event loop ran its timers, median; null where no sample was taken."""
    lag_p99_ms: float | None = None
    client_cpu_share: float = 0.0
    """CPU time of the busiest client process over the stage's duration."""


class LoadStage(StageLoad):
    """The value of ``LOAD_END``. The event has its wall-clock and monotonic times."""

    begin_mono_s: float
    """The clock of ``RequestRecord`` at the beginning of the stage."""


class TokenScenarioResult(Spec):
    """The value of ``TOKEN_SCENARIO``: a LoadGen scenario; latencies include the messages from its process and back."""

    scenario: TokenScenario
    stage: int
    valid: bool
    """LoadGen's verdict, and no query failed."""
    functional: bool
    tokens_per_second: float | None
    """Offline: tokens/s; Server: completed tokens/s at the highest rate that held the limits, null where none did."""
    queries_per_second: float | None
    """Offline: samples/s; Server: the highest rate that held the limits."""
    ttft_limit_ms: float | None = None
    """Limits of the 99th percentile (``slo.share``) of the Server scenario."""
    tpot_limit_ms: float | None = None
    ttft_ms: dict[str, float] = Field(default_factory=dict)
    tpot_ms: dict[str, float] = Field(default_factory=dict)
    tried: tuple[tuple[float, bool], ...] = ()
    num_failed: int
    """Queries that failed, or whose answer has fewer than two tokens; they make the run invalid."""
    log_dir: str
    reason: str | None = None


LoadPhase = Literal[
    "starting server", "warming up", "under load", "scenario offline", "scenario single_stream",
    "scenario multi_stream", "scenario server", "answering benchmarks", "comparing answers",
]  # fmt: skip
SCENARIO_PHASES: Final[Mapping[ScenarioName, LoadPhase]] = {
    "offline": "scenario offline",
    "single_stream": "scenario single_stream",
    "multi_stream": "scenario multi_stream",
    "server": "scenario server",
}


class LoadProgress(Spec):
    """The value of ``HEARTBEAT`` of serving, generation and LoadGen's scenarios."""

    phase: LoadPhase
    num_requests: int = 0
    share: float | None = None
    eta_s: float | None = None


ServeEndReason = Literal[
    "completed", "server_missing", "never_healthy", "server_died", "unreachable", "bad_request", "cancelled", "error"
]


class ServeFinished(FinishedBase):
    """The value of ``FINISHED`` of serving."""

    end_reason: ServeEndReason
    num_requests: int = 0
    seed: int | None = None
    peak_memory_mib: float | None = None
    """Largest resident memory of the server and its children; null where it is not known."""
    load: StartTimes | None = None
