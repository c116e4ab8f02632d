"""Settings of serving: the case, the load and the objectives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from accelmark.spec.errors import nearest
from accelmark.spec.model import FiniteSpec
from accelmark.spec.settings.inference import Benchmark, BenchmarkSettings, InferPrecision, InferSettings, Reference
from accelmark.spec.settings.training import Scalar

Arrival = Literal["closed", "constant", "poisson", "gamma", "trace"]
StageArrival = Literal[Arrival, "at_once"]
"""Arrivals of a stage; LoadGen's Offline scenario requests everything at once."""

TokenScenario = Literal["server", "offline"]
"""Scenarios of MLCommons LoadGen with token latencies."""


class Lengths(FiniteSpec):
    """Distribution of a number of tokens per request."""

    distribution: Literal["fixed", "uniform", "lognormal"] = "fixed"
    """``fixed``: ``mean``; ``uniform``: ``min`` to ``max``; ``lognormal``: by ``mean`` and ``stdev``, within these."""
    mean: PositiveInt = 64
    """Mean number of tokens; not used by ``uniform``."""
    stdev: float = Field(default=0.0, ge=0)
    """Standard deviation of ``lognormal``."""
    min: PositiveInt | None = None
    """Least number of tokens; null: 1."""
    max: PositiveInt | None = None
    """Greatest number of tokens; null: no limit, except for ``uniform``, which needs one."""

    @model_validator(mode="after")
    def _possible(self) -> Lengths:
        if self.distribution == "uniform" and self.max is None:
            raise ValueError("a uniform distribution needs max")
        if self.max is not None and (self.min or 1) > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class PromptSettings(FiniteSpec):
    """Prompts and the requested lengths of answers."""

    source: Literal["text", "jsonl", "sharegpt"] = "text"
    """Windows of the case's text, JSON lines (``prompt`` or ``messages``), or ShareGPT conversations."""
    file: str | None = None
    """File of prompts; null: the case's text."""
    input: Lengths = Lengths()
    """Tokens per prompt, for the source ``text``; for ``sharegpt``, ``min`` and ``max`` select prompts."""
    output: Lengths = Lengths()
    """Tokens per answer, where the source does not state them."""
    output_length: Literal["pinned", "natural"] | None = None
    """Answers of exactly (pinned) or at most (natural) the length; null: pinned, and natural with an endpoint."""
    shared_prefix_tokens: NonNegativeInt = 0
    """Tokens at the start of the prompt that many prompts share, which shows the effect of a prefix cache."""
    num_prefixes: PositiveInt = 1
    """Number of different shared prefixes."""
    repeat: bool = False
    """Whether prompts may be used again when all were used, from which a server's caches profit."""

    @model_validator(mode="after")
    def _complete(self) -> PromptSettings:
        if self.source != "text" and self.file is None:
            raise ValueError(f"source {self.source} needs file")
        return self


class LoadSettings(FiniteSpec):
    """The load: one stage for each concurrency (``closed``) or rate (open arrivals)."""

    arrival: Arrival = "closed"
    """``closed``: a request starts when one ends; ``trace``: at a file's times; else independent of the answers."""
    concurrency: tuple[PositiveInt, ...] = (1, 4, 16)
    """Requests in progress in each stage of a closed load."""
    rates: tuple[PositiveFloat, ...] = ()
    """Requests per second in each stage of an open load."""
    burstiness: PositiveFloat = 1.0
    """Shape of ``gamma`` arrivals: 1 is Poisson, less is burstier, more is more regular."""
    trace: str | None = None
    """JSON lines with ``timestamp`` (s), ``input_tokens`` and ``output_tokens`` of each request."""
    lengths: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """(prompt's, answer's tokens) with which each concurrency or rate is measured; empty: by ``prompts``."""
    duration_s: PositiveFloat = 30.0
    """Time in which requests of a stage are started; those in progress are waited for."""
    max_requests: PositiveInt | None = None
    """Greatest number of requests in a stage."""
    warmup_requests: NonNegativeInt = 4
    """Requests before the first stage, which are in no figure."""
    search: bool = False
    """After the stages, search the highest rate that holds the SLO (Poisson, unless an open arrival is set)."""
    processes: PositiveInt = 1
    """Client processes, which share the load."""

    @model_validator(mode="after")
    def _complete(self) -> LoadSettings:
        if self.arrival in ("constant", "poisson", "gamma") and not self.rates and not self.search:
            raise ValueError(f"arrival {self.arrival} needs load.rates (--rate)")
        if self.arrival == "trace" and self.trace is None:
            raise ValueError("arrival trace needs load.trace, a file")
        return self


SLO_PRESETS: Final[Mapping[str, tuple[float, float]]] = {
    "llama3_1_8b": (2000, 100),
    "llama3_1_8b_interactive": (500, 30),
    "llama2_70b": (2000, 200),
    "llama2_70b_interactive": (450, 40),
    "deepseek_r1": (2000, 80),
    "deepseek_r1_interactive": (1500, 15),
    "gpt_oss_120b": (3000, 80),
    "gpt_oss_120b_interactive": (2000, 15),
}
"""``ttft_ms`` and ``tpot_ms`` (p99) of the Server and Interactive scenarios of MLPerf Inference v6.1 (datacenter)."""


class Slo(FiniteSpec):
    """Service level objective: limits that a share of the requests must hold, each where it is not null."""

    preset: str | None = None
    """MLPerf's limits of a model, by the name in ``SLO_PRESETS``; other settings of ``slo`` replace them."""
    ttft_ms: PositiveFloat | None = None
    """Greatest time to first token (ms)."""
    tpot_ms: PositiveFloat | None = None
    """Greatest time per output token after the first (ms)."""
    e2e_ms: PositiveFloat | None = None
    """Greatest time from when a request was due to its last token (ms)."""
    share: float = Field(default=0.99, gt=0, le=1)
    """Share of the requests that must hold all limits."""

    @property
    def has_limits(self) -> bool:
        """Whether anything is limited."""
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    @field_validator("preset")
    @classmethod
    def _known(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in SLO_PRESETS:
            raise ValueError(f"there is no preset {preset!r} ({nearest(preset, SLO_PRESETS)})")
        return preset


class ServeSettings(BenchmarkSettings):
    """Settings of a serving run."""

    server: str | None = None
    """Server to start (``accelmark serve --server``); null with ``endpoint``."""
    endpoint: str | None = None
    """Base URL of a running server with the OpenAI-compatible API; no server is started."""
    served_model: str | None = None
    """Model name in requests; null: the server's."""
    api: Literal["completions", "chat"] = "completions"
    """OpenAI-compatible API of the requests: ``/v1/completions`` or ``/v1/chat/completions``."""
    precision: InferPrecision = "fp32"
    """Precision that the server computes in."""
    threads: PositiveInt | None = None
    """CPU threads of the server; null: its default."""
    load: LoadSettings = LoadSettings()
    prompts: PromptSettings = PromptSettings()
    slo: Slo = Slo()
    request_timeout_s: PositiveFloat = 120.0
    """Longest duration of a request."""
    start_timeout_s: PositiveFloat = 1800.0
    """Longest wait for the server to become healthy."""
    num_compared: NonNegativeInt = 16
    """Answers under load that are compared with answers to the same prompts, one at a time, from the framework."""
    seed: int | None = None
    """Seed of prompts, lengths and arrivals; null: drawn when the run starts."""
    scenarios: tuple[TokenScenario, ...] = ()
    """LoadGen scenarios after the stages; ``server`` searches the highest rate that holds ``slo``."""
    scenario_duration_s: PositiveFloat = 60.0
    """Least duration of one run of LoadGen; below MLPerf's 600 s a run is labelled functional."""
    scenario_queries: PositiveInt = 500
    """Least number of queries of one run; LoadGen's early stopping needs 459 to find a 99th percentile valid."""
    server_options: dict[str, Scalar] = Field(default_factory=dict)
    """Options of the server by the names in its ``server.yaml``."""

    @property
    def is_pinned(self) -> bool:
        """Whether every answer has exactly the requested number of tokens."""
        pinned = self.prompts.output_length
        return self.endpoint is None if pinned is None else pinned == "pinned"

    @model_validator(mode="after")
    def _one_target(self) -> ServeSettings:
        if self.load.lengths and (self.prompts.source != "text" or self.load.arrival == "trace"):
            raise ValueError("load.lengths needs prompts from a text, and no trace: both state lengths themselves")
        if self.load.search and not self.slo.has_limits:
            raise ValueError("load.search needs a limit: slo.ttft_ms (--ttft), slo.tpot_ms (--tpot) or slo.e2e_ms")
        if "server" in self.scenarios and not (self.slo.ttft_ms and self.slo.tpot_ms):
            raise ValueError("scenarios: server needs slo.ttft_ms and slo.tpot_ms (--ttft, --tpot), or --slo PRESET")
        return self


def generation_load(settings: InferSettings) -> ServeSettings:
    """Return the load of offline generation: closed, a batch of requests at a time, answers of pinned length."""
    lengths = tuple(product(settings.generate_input_tokens, settings.generate_output_tokens))
    same = ("precision", "scenario_duration_s", "scenario_queries", *BenchmarkSettings.model_fields)
    return ServeSettings(
        **{name: getattr(settings, name) for name in same},
        load=LoadSettings(
            concurrency=settings.generate_batches,
            lengths=lengths,
            duration_s=settings.generate_duration_s,
            warmup_requests=0,
        ),
        prompts=PromptSettings(input=Lengths(mean=max(settings.generate_input_tokens)), output_length="pinned"),
        num_compared=settings.generate_compared,
        slo=Slo(ttft_ms=settings.generate_ttft_ms, tpot_ms=settings.generate_tpot_ms),
        scenarios=settings.generate_scenarios,
    )


class ServeCaseSpec(FiniteSpec):
    """The serving side of a case."""

    data: tuple[str, ...] = ()
    """Data sets of the case; the prompts are from their text."""
    weights: str | None = None
    """Directory of weights in Hugging Face's layout below the given data directory."""
    min_agreement: float = Field(default=0.0, ge=0, le=1)
    """Least share of an answer's tokens, from its start, that agree with the framework's greedy answer (mean)."""
    agreement_why: str = ""
    """Reason for ``min_agreement``."""
    benchmarks: dict[Benchmark, Reference] = Field(default_factory=dict)
    """Task of lm-evaluation-harness -> published accuracy of these weights; one of them must be reproduced."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Defaults of :class:`ServeSettings`."""
    mutable: tuple[str, ...] = (
        "server", "server_options", "endpoint", "served_model", "api", "precision", "benchmarks", "benchmark_limit",
        "benchmark_timeout_s", "threads", "load", "slo", "scenarios", "scenario_duration_s", "scenario_queries",
        "request_timeout_s", "start_timeout_s",
    )  # fmt: skip
    """Settings that a run may change; ``a`` allows all of ``a.*``; default: all but prompts, seed, ``num_compared``."""
