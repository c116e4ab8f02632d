"""The versioned schema of ``result.json`` and ``summary.json``, and the marks of results in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator
from pydantic.json_schema import models_json_schema

from accelmark.results.figures import FigureName
from accelmark.spec.job import NodeExit
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from accelmark.spec.log import inference as log
from accelmark.spec.log.inference import AnswerCheck, RepeatCheck, ScenarioResult, StageEnd, StageLoad, StartTimes
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import Target
from accelmark.spec.plugins.vendor import Chip
from accelmark.spec.settings.serving import Slo
from accelmark.spec.settings.training import Scalar
from accelmark.spec.settings.tuning import TrialRole, TuningSpec

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
LATENCIES: Final = {
    "ttft": "Time to first token, from when a request was due",
    "sent_to_first": "Time to first token, from when a request was sent",
    "itl": "Gaps between outputs, over all requests",
    "tpot": "Time per output token after the first, per request",
    "e2e": "From when a request was due to its end",
    "queued": "From when a request was due until it was sent",
    "server_queue": "Time in the server's queue, as the server states it",
}


class Quantile(Spec):
    """A percentile with its 95 % interval."""

    value: FiniteFloat | None
    """Nearest rank; null with a reason."""
    low: FiniteFloat | None = None
    """Limits of the interval; null where no sample is extreme enough."""
    high: FiniteFloat | None = None
    num_independent: int = 0
    """Number of independent samples that would give an interval of this width."""
    reason: str | None = None


class Distribution(Spec):
    """Latencies in milliseconds of the requests of a stage's window."""

    count: int
    mean: FiniteFloat | None = None
    quantiles: dict[str, Quantile] = Field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()
    """(share of the samples, latency that they do not exceed), for charts."""

    def at(self, name: str) -> float | None:
        """Return the percentile ``name``, None where it was not measured."""
        quantile = self.quantiles.get(name)
        return quantile.value if quantile is not None else None


class ServingStage(StageLoad):
    """One stage of the load, over its steady-state window. A figure without a value was not measured (``reasons``)."""

    window_s: tuple[float, float] | None
    """Begin and end of the window in seconds since the stage began; null with a reason."""
    num_measured: int
    """Requests that were due in the window."""
    errors: dict[str, int] = Field(default_factory=dict)
    """Status -> failed requests of the whole stage."""
    latencies: dict[str, Distribution] = Field(default_factory=dict)
    """Name of :data:`LATENCIES` -> distribution."""
    offered_rate: FiniteFloat | None = None
    """Requests per second that were due in the window."""
    request_rate: FiniteFloat | None = None
    """Requests per second that were answered in the window."""
    output_token_rate: FiniteFloat | None = None
    """Tokens per second whose outputs arrived in the window."""
    total_token_rate: FiniteFloat | None = None
    """The same with the prompts' tokens, at the first output."""
    token_rate_per_device: FiniteFloat | None = None
    token_rate_per_user: FiniteFloat | None = None
    """Output tokens per second that one request gets: 1 / median TPOT."""
    tokens_per_output: FiniteFloat | None = None
    """Mean number of tokens of an output; ITL is per output."""
    goodput: FiniteFloat | None = None
    """Requests per second that were due in the window and held all limits of the SLO."""
    slo_share: FiniteFloat | None = None
    """Share of the requests due in the window that held all limits; failed ones did not."""
    slo_share_low: FiniteFloat | None = None
    """Limits of its 95 % interval (Wilson)."""
    slo_share_high: FiniteFloat | None = None
    holds_slo: bool | None = None
    """Whether the share was high enough, and the server kept up with the load; null without limits."""
    is_saturated: bool = False
    """Whether many more requests were due in the window of an open load than were answered in it."""
    mean_concurrency: FiniteFloat | None = None
    littles_concurrency: FiniteFloat | None = None
    """The same by Little's law: rate of requests due x their mean latency."""
    mean_power_w: FiniteFloat | None = None
    joules_per_token: FiniteFloat | None = None
    tokens_per_joule: FiniteFloat | None = None
    num_tokens_unknown: int = 0
    """Answers whose tokens neither a tokenizer nor the server counted."""
    num_wrong_length: int = 0
    """Answers with another length than the requested one, where it is pinned."""
    wrong_length: str | None = None
    """The first of them, in words."""
    own_tokens: int = 0
    """Tokens of the answers that have both counts, by the model's own tokenizer."""
    usage_tokens: int = 0
    """Tokens of these answers by the server's ``usage``."""
    own_prompt_tokens: int = 0
    usage_prompt_tokens: int = 0
    num_implausible: int = 0
    """Requests whose times contradict each other or the events, and records that the load generator did not count."""
    num_missing: int = 0
    """Requests that the load generator counted and that have no record."""
    prefill_token_rate: FiniteFloat | None = None
    """Of offline generation, here and below: prompts' tokens per second of prefill, from when a batch was due to its
    first tokens."""
    decode_token_rate: FiniteFloat | None = None
    """Tokens after the first per second of decoding."""
    kv_cache_mib: FiniteFloat | None = None
    """Keys and values of a whole batch at the end of its answers, computed from the model's shapes."""
    prefill_mfu: FiniteFloat | None = None
    """FLOP/s of the prefill over the chip's peak; null without one."""
    decode_mfu: FiniteFloat | None = None
    decode_mbu: FiniteFloat | None = None
    """Bytes that decoding must read per second over the chip's memory bandwidth; null without one."""
    reasons: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The stage's load in words."""
        lengths = f", {self.lengths} tokens" if self.lengths else ""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time{lengths}"
        if self.scenario is not None:
            return f"LoadGen {self.scenario}" + ("" if self.rate is None else f", {self.rate:.4g}/s")
        word = {"constant": "constant", "poisson": "Poisson", "gamma": "gamma"}.get(self.arrival, self.arrival)
        return (word if self.rate is None else f"{self.rate:.4g}/s {word}") + lengths

    @property
    def lengths(self) -> str:
        """Tokens of each prompt and answer, where the stages differ in them: ``64 + 32``; else empty."""
        return "" if self.input_tokens is None else f"{self.input_tokens} + {self.output_tokens}"

    @property
    def short_label(self) -> str:
        """Concurrency or rate of the stage."""
        if self.concurrency is not None:
            return str(self.concurrency)
        return "" if self.rate is None else f"{self.rate:.3g}/s"

    def quantile(self, latency: str, name: str) -> float | None:
        """Return a percentile of a latency in ms; None where it was not measured."""
        distribution = self.latencies.get(latency)
        return distribution.at(name) if distribution is not None else None

    @property
    def num_failed(self) -> int:
        """Requests of the whole stage that were not answered."""
        return sum(self.errors.values())


class AnswersCompared(Spec):
    """Answers under load against the framework's greedy answers to the same prompts."""

    num_promised: int
    num_compared: int
    agreement: FiniteFloat | None
    """Mean share of an answer's tokens, from its start, that agree."""
    worst: FiniteFloat | None
    min_agreement: float
    num_foreign: int = 0
    """Comparisons of answers that no successful request has."""


class PromptUse(Spec):
    """How often prompts were repeated, and how fast the same prompt was answered again."""

    num_requests: int
    num_unique: int
    num_repeated: int
    """Answered requests whose prompt was used before."""
    e2e_speedup: FiniteFloat | None = None
    """Ratio of two medians of the duration per token relative to the stage: first uses over repeated uses."""
    tpot_speedup: FiniteFloat | None = None
    ttft_speedup: FiniteFloat | None = None


class TimelineRequest(Spec):
    """A request of the headline stage, for the chart: seconds since the stage began."""

    number: int
    due_s: float
    sent_s: float | None
    queue_s: float | None = None
    first_s: float | None
    end_s: float
    status: str


class ServingRound(Spec):
    """Results of a serving round, without figures."""

    server: str | None
    engine: str | None = None
    """Engine of offline generation, which has neither a server nor an endpoint."""
    endpoint: str | None
    served_model: str | None
    api: str
    command: tuple[str, ...] = ()
    start_s: float | None = None
    start: StartTimes | None = None
    load: StartTimes | None = None
    """Of the framework, which loads the same model to compare answers."""
    facts: dict[str, Scalar] = Field(default_factory=dict)
    """Quantisation, KV-cache type and speculative decoding by the server's options; null: the server's default."""
    num_devices: int
    server_cores: tuple[int, ...] = ()
    """Cores of the server; empty where server and client share all cores."""
    client_cores: tuple[int, ...] = ()
    """Cores of the client alone."""
    has_tokenizer: bool
    output_length: str
    slo: Slo
    stages: tuple[ServingStage, ...] = ()
    """Without warm-up."""
    headline: int | None = None
    """The stage with the round's figures; null where no stage has figures."""
    headline_why: str = ""
    highest_rate: FiniteFloat | None = None
    highest_rate_note: str = ""
    answers: AnswersCompared
    prompts: PromptUse
    scores: tuple[log.BenchmarkScore, ...] = ()
    """Accuracy in tasks of lm-evaluation-harness."""
    scenarios: tuple[log.TokenScenarioResult, ...] = ()
    timeline: tuple[TimelineRequest, ...] = ()
    malformed_lines: int = 0
    """Lines of requests.jsonl and answers.jsonl that could not be read."""

    @property
    def source(self) -> str:
        """Name of the server or engine, or ``endpoint``."""
        return self.server or self.engine or "endpoint"

    @property
    def headline_stage(self) -> ServingStage | None:
        """The stage with the round's figures."""
        return next((stage for stage in self.stages if stage.stage == self.headline), None)

    @property
    def planned_stages(self) -> list[ServingStage]:
        """The stages of the load, without steps of a search and LoadGen's."""
        return [stage for stage in self.stages if not stage.is_search and stage.scenario is None]


_ROUNDING: Final = 1e-9

JobState = Literal["queued", "preparing", "running", "succeeded", "failed", "timed_out", "lost", "cancelled"]
Task = Literal["train", "infer", "serve", "automl"]
Mark = Literal[
    "open",
    "synthetic",
    "made_up_data",
    "speed_only",
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


Figures = dict[FigureName, Figure]


def value(number: float | None, reason: str) -> Figure:
    """Return a figure; ``reason`` applies where ``number`` is None or not finite."""
    if number is None or number - number != 0:
        return Figure(value=None, reason=reason)
    return Figure(value=number)


def ratio(over: float | None, under: float | None, reason: str) -> Figure:
    """Return a quotient; null with ``reason`` where an operand is None or the divisor is not positive."""
    return value(over / under if over is not None and under and under > 0 else None, reason)


class Point(Spec):
    """A point of a curve: optimizer step, seconds of raw training time, value."""

    step: int
    time_s: float
    value: float | None


Quantity = Literal["utilisation", "memory", "power", "temperature", "clock", "cpu", "rank_memory", "host_memory"]


class TelemetrySeries(Spec):
    """One column of telemetry over raw training time, downsampled for charts."""

    quantity: Quantity
    unit: str
    label: str
    points: tuple[tuple[float, float | None], ...]
    """(seconds since TRAIN_START, value), negative before it; of a load since its first stage began."""


class Environment(Spec):
    """Hardware and software of a run, as read from the machine."""

    hosts: tuple[dict[str, Any], ...] = ()
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
VERDICTS: Final[dict[Verdict, str]] = {
    "VALID": "The result counts: every round used the case's data and fixed settings and reached its target, if it has "
    "one. The audit confirmed it.",
    "OPEN": "Not a closed result: fixed settings were unlocked with --open, or the audit could not confirm something.",
    "INVALID": "The result does not count: a round failed, the target was missed, the data was synthetic, or records "
    "contradict each other.",
}
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
    """The verdict on a case, its findings, and the vendor's changes."""

    verdict: Verdict
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    adaptation: AdaptationCost | None


class InferenceRound(Spec):
    """Results of an inference round, without figures."""

    compiler: str | None
    batch_size: int
    metric: str
    metric_title: str = ""
    """What the metric is, with its unit where it has one; empty: its name."""
    tolerance: float
    stages: tuple[StageEnd, ...] = ()
    repeat_check: RepeatCheck | None = None
    answers: AnswerCheck | None = None
    isolated: bool = False
    """Whether the engine had a separate process; False in runs of earlier versions."""
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
    longest_s: FiniteFloat = 0.0
    """Its longest single computation or wait for data."""
    num_steps: int = 1

    @property
    def busy_ms(self) -> float:
        """Time until the other ranks could continue."""
        return self.data_wait_ms + self.own_ms


class Straggler(Spec):
    """The rank that the others wait for most."""

    rank: int
    host: str
    share: FiniteFloat
    """Its time beyond the median of the other ranks, as a share of a step."""
    cause: Literal["data", "computation"]
    is_whole_host: bool
    """Whether its host has several ranks, all slower than the ranks of other hosts by more than the limit."""
    pause_s: FiniteFloat | None = None
    """Length of the one step that costs more than half of the time; null where its steps are slow in general."""


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
    num_samples: int = 0
    num_devices: int = 1
    min_rounds: int = 1
    """Rounds that the case requires for a valid result."""
    role: TrialRole | None = None
    rules: str | None = None
    """Rules of the run, with version and hash; null: the case's own."""
    inference: InferenceRound | None = None
    serving: ServingRound | None = None
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
        figure = self.figures.get(name)
        return figure.value if figure is not None else None


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
    """All findings of the audit and of the rounds; they determine the verdict."""
    adaptation: AdaptationCost | None = None
    """What the vendor changed; null where no round has a job.json."""

    def mean_of(self, name: FigureName) -> float | None:
        """Return the mean of a figure; None where it was not measured."""
        spread = self.figures.get(name)
        return spread.mean if spread is not None else None

    @property
    def verdict_text(self) -> str:
        """What the verdict means, in a sentence, or that a cancelled case was not judged."""
        if self.state == "cancelled":
            return "The run was stopped by a person, a signal or the scheduler, and was not judged."
        speed = " The case states no target, so convergence was not checked." if "speed_only" in self.marks else ""
        unreliable = " Other work used the machine: the timing is unreliable." if self.is_timing_unreliable else ""
        return f"{VERDICTS[self.verdict]}{speed}{unreliable}"

    @property
    def verdict_note(self) -> str:
        """What limits a VALID result, for its badge: ``speed only``, ``timing unreliable``."""
        notes = {"speed only": "speed_only" in self.marks, "timing unreliable": self.is_timing_unreliable}
        return ", ".join(note for note, applies in notes.items() if applies and self.verdict == "VALID")

    @property
    def is_timing_unreliable(self) -> bool:
        """Whether the result is VALID, but other work used the machine while it was timed."""
        return self.verdict == "VALID" and "busy_machine" in self.marks

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
    problems: tuple[str, ...] = ()

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


_WORDS: Final = {"made_up_data": "made-up data"}
"""Marks that are written otherwise than with blanks."""


def mark_text(mark: str) -> str:
    """Return a mark as pages and tables write it: ``busy machine``."""
    return _WORDS.get(mark, mark.replace("_", " "))


def marks_text(marks: Iterable[str]) -> str:
    """Return marks in one text, separated by commas; empty without a mark."""
    return ", ".join(map(mark_text, marks))


def with_marks(text: str, marks: Iterable[str]) -> str:
    """Return a text, such as a verdict, with its marks in brackets."""
    listed = marks_text(marks)
    return f"{text} ({listed})" if listed else text
