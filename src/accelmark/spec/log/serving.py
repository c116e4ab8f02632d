"""Serving: the records of requests and the values of its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import Field

from accelmark.spec.log.events import FinishedBase, StartedBase
from accelmark.spec.model import Spec
from accelmark.spec.settings.inference import Benchmark, ScenarioName
from accelmark.spec.settings.serving import StageArrival, TokenScenario

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
