"""The part of a run's page about a served model: stages of the load, latencies, trade-offs and a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

from accelmark.report.charts import Chart, LoadCurve, LoadPoint, latency_chart, timeline_chart, tradeoff_chart
from accelmark.results.schema import LATENCIES, PERCENTILES, Quantile, RoundResult, ServingRound, ServingStage
from accelmark.spec.log.serving import TokenScenarioResult
from accelmark.spec.number_format import NOTHING, digits, percent
from accelmark.spec.settings.serving import Slo

_TITLES: Final = {
    "ttft": "TTFT", "sent_to_first": "Sent to first token", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end",
    "queued": "Due to sent", "server_queue": "In the server's queue",
}  # fmt: skip
_FACTS: Final = {
    "quantisation": "Quantisation",
    "kv_cache_type": "Type of the KV cache",
    "speculative_decoding": "Speculative decoding",
}
_CHARTED: Final = ("ttft", "tpot", "itl", "e2e")
_GENERATION: Final = (
    ("Prefill, tokens/s", "Of prompts: batch x tokens of a prompt / (first output - due)", "prefill_token_rate"),
    ("Decoding, tokens/s", "After the first token: batch x (tokens - 1) / (end - first output)", "decode_token_rate"),
    ("Prefill MFU", "FLOP/s over the chip's dense peak", "prefill_mfu"),
    ("MBU", "Weights and KV cache read by decode steps over the chip's memory bandwidth", "decode_mbu"),
    ("KV cache, MiB", "Of the batch at the end of its answers", "kv_cache_mib"),
)
"""Columns of offline generation: head, explanation, field of a stage."""
_TRADEOFF: Final = (
    ("ttft", "p50", 0, "solid"), ("ttft", "p99", 0, "dash"), ("tpot", "p50", 1, "solid"), ("tpot", "p99", 1, "dash"),
)  # fmt: skip


class Cell(NamedTuple):
    """A value of the table of stages, and what is shown on hover."""

    text: str
    note: str = ""


class Column(NamedTuple):
    """A column of the table of stages."""

    head: str
    note: str
    cell: Callable[[ServingStage], Cell]


def serving_view(result: RoundResult | None) -> dict[str, Any] | None:
    """Return the values of ``run/serving.html`` for a round; None for other tasks."""
    if result is None or result.serving is None:
        return None
    serving = result.serving
    headline, columns = serving.headline_stage, list(_columns(serving))
    measured = [stage for stage in serving.stages if stage.window_s is not None]
    distributions = {
        _TITLES[name]: latency_chart(
            [(stage.label, stage.latencies[name].curve) for stage in measured if name in stage.latencies], "the samples"
        )
        for name in _CHARTED
    }
    return {
        "round": result.round,
        "serving": serving,
        "columns": columns,
        "rows": [
            {
                "label": stage.label, "is_headline": stage.stage == serving.headline, "is_search": stage.is_search,
                "cells": [column.cell(stage) for column in columns],
            }
            for stage in serving.stages
        ],
        "headline": headline.label if headline else "",
        "latencies": [
            {
                "title": title, "explanation": LATENCIES[name], "samples": f"{spread.count:,}",
                "cells": [_shown(spread.quantiles[share]) for share in PERCENTILES if share in spread.quantiles],
            }
            for name, title in _TITLES.items()
            if headline and (spread := headline.latencies.get(name))
        ],
        "percentiles": list(PERCENTILES),
        "tradeoffs": list(_tradeoffs(measured)),
        "distributions": [(title, chart) for title, chart in distributions.items() if chart is not None],
        "timeline": timeline_chart(serving.timeline, headline.window_s if headline else None),
        "facts": list(_facts(serving)),
    }  # fmt: skip


def _columns(serving: ServingRound) -> Iterator[Column]:
    """Yield the columns of the table; those without any value are left out."""

    def window(stage: ServingStage) -> Cell:
        if stage.window_s is None:
            return Cell(NOTHING, "; ".join(stage.reasons))
        return Cell(f"{stage.window_s[0]:.1f}–{stage.window_s[1]:.1f}")

    def requests(stage: ServingStage) -> Cell:
        number = stage.num_requests if stage.window_s is None else stage.num_measured
        return Cell(f"{number:,}", f"{stage.num_requests:,} in the whole stage")

    def failed(stage: ServingStage) -> Cell:
        kinds = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in stage.errors.items())
        return Cell(f"{stage.num_failed:,}", kinds)

    def slo_share(stage: ServingStage) -> Cell:
        if stage.slo_share is None:
            return Cell(NOTHING)
        held = "holds the SLO" if stage.holds_slo else "fell behind" if stage.is_saturated else "misses the SLO"
        interval = f"95 % interval {percent(stage.slo_share_low, 3)} to {percent(stage.slo_share_high, 3)}"
        return Cell(percent(stage.slo_share, 3), f"{held}; {interval}")

    def in_progress(stage: ServingStage) -> Cell:
        by_law = stage.littles_concurrency
        return _number(stage.mean_concurrency, 3, "" if by_law is None else f"by Little's law {digits(by_law, 3)}")

    def field(name: str, stage: ServingStage) -> Cell:
        value = getattr(stage, name)
        if value is not None and name.endswith(("mfu", "mbu")):
            return Cell(percent(value, 3))
        return _number(value)

    def is_known(name: str) -> bool:
        return any(getattr(stage, name) is not None for stage in serving.stages)

    def request_rate(stage: ServingStage) -> Cell:
        return _number(stage.request_rate, note="the server fell behind" if stage.is_saturated else "")

    yield Column("Window, s", "Steady state, since the stage began", window)
    yield Column("Requests", "Due in the window; without a window, in the whole stage", requests)
    yield Column("Failed", "Requests of the whole stage", failed)
    yield Column("Requests/s", "Answered in the window", request_rate)
    yield Column("Tokens/s", "Output tokens", partial(field, "output_token_rate"))
    if serving.num_devices > 1:
        yield Column("Tokens/s per device", "Output tokens", partial(field, "token_rate_per_device"))
    for head, note, name in _GENERATION:
        if is_known(name):
            yield Column(head, note, partial(field, name))
    yield Column("Tokens/s per user", "1 / median TPOT", partial(field, "token_rate_per_user"))
    yield Column("TTFT p50 · p99, ms", "Median and 99th percentile", partial(_pair, "ttft"))
    yield Column("TPOT p50 · p99, ms", "Median and 99th percentile", partial(_pair, "tpot"))
    yield Column("ITL p99, ms", "99th percentile", lambda stage: _number(stage.quantile("itl", "p99")))
    if is_known("slo_share"):
        yield Column("In SLO", "Share of the requests that held all limits", slo_share)
        yield Column("Goodput/s", "Requests that held all limits", partial(field, "goodput"))
    if is_known("tokens_per_joule"):
        yield Column("Tokens/J", "Output tokens per joule", partial(field, "tokens_per_joule"))
    yield Column("In progress", "Mean number of requests in the window; by Little's law on hover", in_progress)


def _number(value: float | None, significant: int = 4, note: str = "") -> Cell:
    return Cell(NOTHING if value is None else digits(value, significant), note)


def _pair(latency: str, stage: ServingStage) -> Cell:
    """Return median and p99, with their intervals on hover."""
    distribution = stage.latencies.get(latency)
    if distribution is None:
        return Cell(NOTHING)
    shown = {name: _shown(distribution.quantiles[name]) for name in ("p50", "p99")}
    notes = (f"{name} {interval}" for name, (_, interval) in shown.items() if interval)
    return Cell(" · ".join(value for value, _ in shown.values()), "; ".join(notes))


def _shown(quantile: Quantile) -> tuple[str, str]:
    """Return a percentile, and its interval or the reason why there is none."""
    if quantile.value is None:
        return NOTHING, quantile.reason or ""
    low = "" if quantile.low is None else digits(quantile.low, 3)
    high = "" if quantile.high is None else digits(quantile.high, 3)
    interval = f"{low}–{high}" if low and high else f"≥ {low}" if low else f"≤ {high}" if high else ""
    return digits(quantile.value), interval


def _tradeoffs(stages: Sequence[ServingStage]) -> Iterator[tuple[str, str, Chart]]:
    """Yield title, explanation and chart."""
    kinds = " Filled: open load." if len({stage.concurrency is None for stage in stages}) > 1 else ""
    stages = sorted(stages, key=_load)
    latencies = [
        LoadCurve(f"{_TITLES[name]} {share}", number, dash, list(_latency_points(stages, name, share)))
        for name, share, number, dash in _TRADEOFF
    ]
    if latency := tradeoff_chart(latencies, "output tokens/s", "Latency", is_latency=True):
        lead = f"One point per stage, with 95 % intervals; better to the lower right.{kinds}"
        yield "Throughput and latency", lead, latency
    rates = [LoadCurve("stages", 0, "solid", list(_pareto_points(stages)))]
    if pareto := tradeoff_chart(rates, "output tokens/s per user", "Output tokens/s per device", is_latency=False):
        yield "Speed for one user and for the device", f"One point per stage; better to the upper right.{kinds}", pareto


def _latency_points(stages: Sequence[ServingStage], name: str, share: str) -> Iterator[LoadPoint]:
    for stage in stages:
        quantile = stage.latencies[name].quantiles.get(share) if name in stage.latencies else None
        rate = stage.output_token_rate
        if quantile is None or quantile.value is None or rate is None:
            continue
        text = f"{stage.label}: {_TITLES[name]} {share} {digits(quantile.value)} ms at {digits(rate)} tokens/s"
        highest = "p99" if stage.quantile("ttft", "p99") is not None else "p50"
        label = _name(stage, stages) if (name, share) == ("ttft", highest) else ""
        is_open = stage.concurrency is None
        yield LoadPoint(rate, quantile.value, limits_of(quantile), label, text, is_open, stage.lengths)


def limits_of(quantile: Quantile) -> tuple[float, float] | None:
    """Return the interval of a percentile; None where it has no limit on a side."""
    return (quantile.low, quantile.high) if quantile.low is not None and quantile.high is not None else None


def _name(stage: ServingStage, stages: Sequence[ServingStage]) -> str:
    """Return the load of a stage, for its point; the last point of each line also has the lengths, if they differ."""
    alike = [other for other in stages if other.lengths == stage.lengths]
    is_last = len(alike) < len(stages) and alike[-1] is stage
    return f"{stage.short_label} ({stage.lengths})" if is_last and stage.lengths else stage.short_label


def _pareto_points(stages: Sequence[ServingStage]) -> Iterator[LoadPoint]:
    for stage in stages:
        per_user, per_device = stage.token_rate_per_user, stage.token_rate_per_device
        if per_user is not None and per_device is not None:
            text = f"{stage.label}: {digits(per_user)} tokens/s per user, {digits(per_device)} per device"
            label, is_open = _name(stage, stages), stage.concurrency is None
            yield LoadPoint(per_user, per_device, None, label, text, is_open, stage.lengths)


def _load(stage: ServingStage) -> tuple[bool, float]:
    return stage.concurrency is None, stage.concurrency or stage.rate or 0.0


def _slo_text(slo: Slo) -> str:
    named = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "end to end": slo.e2e_ms}
    limits = [f"{title} ≤ {limit:g} ms" for title, limit in named.items() if limit is not None]
    return f"{', '.join(limits)} for {percent(slo.share, 3)} of the requests" if limits else "none"


def _scenario_text(result: TokenScenarioResult) -> str:
    """Return a LoadGen scenario in words."""
    if result.tokens_per_second is None:
        return f"no figure: {result.reason or 'LoadGen reported none'}"
    verdict = "VALID" if result.valid else f"INVALID: {result.reason or 'see its log'}"
    parts = [f"{digits(result.tokens_per_second)} tokens/s", f"{digits(result.queries_per_second or 0.0)} queries/s"]
    for title, percentiles, limit in (
        ("TTFT", result.ttft_ms, result.ttft_limit_ms),
        ("TPOT", result.tpot_ms, result.tpot_limit_ms),
    ):
        if limit is not None and "p99" in percentiles:
            parts.append(f"{title} p99 {digits(percentiles['p99'])} ms (limit {limit:g} ms)")
    length = "; shorter than MLPerf requires: a functional test" if result.functional else ""
    return f"{', '.join(parts)}, by LoadGen, which reports {verdict}{length}"


def _facts(serving: ServingRound) -> Iterator[tuple[str, str]]:
    answers, prompts = serving.answers, serving.prompts
    if serving.engine is not None:
        yield "Engine", f"{serving.engine}, offline: a batch of requests at a time"
    else:
        yield ("Server", serving.server) if serving.server else ("Endpoint", serving.endpoint or "")
        if serving.command:
            yield "Command line", " ".join(serving.command)
        yield "Model in requests", f"{serving.served_model or NOTHING} ({serving.api})"
    yield "Devices", str(serving.num_devices)
    for fact, setting in serving.facts.items():
        yield _FACTS[fact], "the server's default" if setting is None else str(setting)
    is_pinned = serving.output_length == "pinned"
    yield "Length of answers", "pinned to the requested number of tokens" if is_pinned else "natural"
    yield "Tokens counted by", "the model's own tokenizer" if serving.has_tokenizer else "the server (usage)"
    yield "SLO", _slo_text(serving.slo)
    if answers.agreement is not None:
        least = f"at least {percent(answers.min_agreement, 4)} required"
        agreeing = f"{percent(answers.agreement, 4)} of the tokens of {answers.num_compared} answers under load"
        yield "Agreement", f"{agreeing}, from their start, equal the framework's greedy answers ({least})"
    for score in serving.scores:
        deviation = f" ± {percent(score.stderr, 2)} (standard error)" if score.stderr is not None else ""
        of = f"{score.num_questions:,} questions, {score.num_fewshot} examples each, {score.metric}"
        harness = f"lm-evaluation-harness {score.harness_version}, task version {score.task_version}"
        yield score.task.upper(), f"{percent(score.value, 4)}{deviation} of {of} ({harness})"
    for result in serving.scenarios:
        yield f"LoadGen {result.scenario}", _scenario_text(result)
    yield "Prompts", f"{prompts.num_unique:,} different in {prompts.num_requests:,} requests"
    if lags := [(stage.lag_p99_ms, stage.label) for stage in serving.stages if stage.lag_p99_ms is not None]:
        lag_ms, label = max(lags)
        busiest = percent(max(stage.client_cpu_share for stage in serving.stages))
        yield "Client", f"timers {digits(lag_ms, 3)} ms late (p99, {label}), busiest process {busiest} of a core"
    if serving.client_cores:
        yield "Cores", f"server {_cores(serving.server_cores)}; client {_cores(serving.client_cores)}, for it alone"


def _cores(cores: Sequence[int]) -> str:
    """Return numbers of cores, with ranges: ``0-6, 9``."""
    ranges = []
    for _, run in groupby(enumerate(cores), key=lambda pair: pair[1] - pair[0]):
        numbers = [core for _, core in run]
        ranges.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(ranges)
