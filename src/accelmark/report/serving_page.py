"""The part of a run's page about a served model: stages of the load, latencies, trade-offs and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from accelmark.report.charts import KeyedChart, keys_of, latency_chart
from accelmark.report.load_charts import HALF, LoadCurve, LoadPoint, timeline_chart, tradeoff_chart
from accelmark.results.schema import RoundResult
from accelmark.results.serving_schema import LATENCIES, PERCENTILES, Distribution, Quantile, ServingRound, ServingStage
from accelmark.spec.number_format import NOTHING, THIN, digits, percent
from accelmark.spec.serving import Slo

_TITLES: Final = {
    "ttft": "TTFT", "sent_to_first": "Sent to first token", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end",
    "queued": "Due to sent",
}  # fmt: skip
_CHARTED: Final = ("ttft", "tpot", "itl", "e2e")
_TRADEOFF: Final = (
    ("ttft", "p50", 1, "none"), ("ttft", "p99", 1, "7 4"), ("tpot", "p50", 2, "none"), ("tpot", "p99", 2, "7 4"),
)  # fmt: skip
HEADS: Final = (
    ("Load", ""), ("Window", "Steady state, seconds since the stage began"), ("Requests", "Due in the window"),
    ("Failed", "Of the whole stage"), ("Requests/s", "Answered in the window"), ("Tokens/s", "Output tokens"),
    ("per device", "Output tokens/s over the number of devices"), ("per user", "1 / median TPOT"), ("TTFT p50", "ms"),
    ("TTFT p99", "ms"),
    ("TPOT p50", "ms"), ("TPOT p99", "ms"), ("ITL p99", "ms"), ("Within SLO", "Share of the requests"),
    ("Goodput/s", "Requests that held all limits"), ("Tokens/J", "Output tokens per joule"),
    ("In progress", "Mean number of requests; by Little's law"),
)  # fmt: skip


class Cell(NamedTuple):
    """A value of the table of stages, and what is shown on hover."""

    text: str
    note: str = ""


class StageRow(NamedTuple):
    """One stage of the table."""

    label: str
    is_headline: bool
    is_search: bool
    cells: list[Cell]


class LatencyRow(NamedTuple):
    """One latency of the headline stage."""

    title: str
    explanation: str
    samples: str
    cells: list[tuple[str, str]]
    """(value, interval or reason) of each percentile."""


class ServingView(NamedTuple):
    """The values of ``serving.html`` for one case."""

    round: int
    serving: ServingRound
    heads: Sequence[tuple[str, str]]
    rows: list[StageRow]
    headline: str
    latencies: list[LatencyRow]
    percentiles: list[str]
    tradeoffs: list[tuple[str, str, KeyedChart]]
    """(title, explanation, chart)."""
    distributions: list[tuple[str, KeyedChart]]
    keys: tuple[tuple[str, int, str], ...]
    """Of all distributions."""
    timeline: Markup | None
    facts: list[tuple[str, str]]


def serving_view(result: RoundResult | None) -> ServingView | None:
    """Return the view of a round; None for other tasks."""
    if result is None or result.serving is None:
        return None
    serving = result.serving
    headline = serving.headline_stage
    measured = [stage for stage in serving.stages if stage.window_s is not None]
    charts = ((name, _distribution_chart(measured, name)) for name in _CHARTED)
    return ServingView(
        round=result.round,
        serving=serving,
        heads=HEADS,
        rows=[_row(stage, serving) for stage in serving.stages],
        headline=headline.label if headline else "",
        latencies=[_latency(name, found) for name in _TITLES if headline and (found := headline.latencies.get(name))],
        percentiles=list(PERCENTILES),
        tradeoffs=list(_tradeoffs(measured)),
        distributions=[(_TITLES[name], chart) for name, chart in charts if chart],
        keys=keys_of([stage.label for stage in measured]),
        timeline=timeline_chart(serving.timeline, headline.window_s if headline else None),
        facts=list(_facts(serving)),
    )


def _row(stage: ServingStage, serving: ServingRound) -> StageRow:
    window = "" if stage.window_s is None else f"{stage.window_s[0]:.1f}–{stage.window_s[1]:.1f}{THIN}s"
    failed = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in stage.errors.items())
    reason = "; ".join(stage.reasons)
    share = Cell(percent(stage.slo_share, 3))
    if stage.slo_share_low is not None:
        held = "holds the SLO" if stage.holds_slo else "fell behind" if stage.is_saturated else "misses the SLO"
        share = Cell(
            percent(stage.slo_share, 3),
            f"{held}; {percent(stage.slo_share_low, 3)} to {percent(stage.slo_share_high, 3)}",
        )
    progress = _number(stage.mean_concurrency, 3)
    if stage.littles_concurrency is not None:
        progress = Cell(progress.text, f"by Little's law {digits(stage.littles_concurrency, 3)}")
    return StageRow(
        stage.label,
        stage.stage == serving.headline,
        stage.is_search,
        [
            Cell(window or NOTHING, reason),
            Cell(f"{stage.num_measured:,}", f"{stage.num_requests:,} in the whole stage"),
            Cell(f"{stage.num_failed:,}", failed),
            _number(stage.request_rate, note="the server fell behind" if stage.is_saturated else reason),
            _number(stage.output_token_rate, note=reason),
            _number(stage.token_rate_per_device),
            _number(stage.token_rate_per_user),
            *(
                _quantile(stage, *of)
                for of in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"))
            ),
            share,
            _number(stage.goodput),
            _number(stage.tokens_per_joule),
            progress,
        ],
    )


def _number(value: float | None, significant: int = 4, note: str = "") -> Cell:
    return Cell(NOTHING if value is None else digits(value, significant), note)


def _quantile(stage: ServingStage, latency: str, name: str) -> Cell:
    found = stage.latencies.get(latency)
    quantile = found.quantiles.get(name) if found is not None else None
    return Cell(NOTHING) if quantile is None else Cell(*_shown(quantile))


def _shown(quantile: Quantile) -> tuple[str, str]:
    """Return a percentile, and its interval or the reason why there is none."""
    if quantile.value is None:
        return NOTHING, quantile.reason or ""
    low = "" if quantile.low is None else digits(quantile.low, 3)
    high = "" if quantile.high is None else digits(quantile.high, 3)
    interval = f"{low}–{high}" if low and high else f"≥ {low}" if low else f"≤ {high}" if high else ""
    return digits(quantile.value), interval


def _latency(name: str, found: Distribution) -> LatencyRow:
    cells = [_shown(found.quantiles[each]) for each in PERCENTILES if each in found.quantiles]
    return LatencyRow(_TITLES[name], LATENCIES[name], f"{found.count:,}", cells)


def _distribution_chart(stages: Sequence[ServingStage], name: str) -> KeyedChart | None:
    curves = [(stage.label, stage.latencies[name].curve if name in stage.latencies else ()) for stage in stages]
    return latency_chart(curves, "the samples", HALF)


def _tradeoffs(stages: Sequence[ServingStage]) -> Iterator[tuple[str, str, KeyedChart]]:
    latency = tradeoff_chart(
        [
            LoadCurve(f"{_TITLES[name]} {share}", colour, dashes, list(_latency_points(stages, name, share)))
            for name, share, colour, dashes in _TRADEOFF
        ],
        "output tokens/s",
        "Latency",
        is_latency=True,
    )
    if latency is not None:
        yield (
            "Throughput and latency",
            "One point per stage, with 95 % intervals; both axes better to the lower right.",
            latency,
        )
    pareto = tradeoff_chart(
        [LoadCurve("stages", 1, "none", list(_pareto_points(stages)))],
        "output tokens/s per user",
        "Output tokens/s per device",
        is_latency=False,
    )
    if pareto is not None:
        yield "Speed for one user and for the device", "One point per stage; better to the upper right.", pareto


def _latency_points(stages: Sequence[ServingStage], name: str, share: str) -> Iterator[LoadPoint]:
    for stage in sorted(stages, key=_load):
        found = stage.latencies[name].quantiles.get(share) if name in stage.latencies else None
        if found is None or found.value is None or stage.output_token_rate is None:
            continue
        at = f"{digits(found.value)} ms at {digits(stage.output_token_rate)} tokens/s"
        text = f"{stage.label}: {_TITLES[name]} {share} {at}"
        label = short_label(stage) if (name, share) == ("ttft", "p50") else ""
        yield LoadPoint(stage.output_token_rate, found.value, found.low, found.high, label, text)


def _pareto_points(stages: Sequence[ServingStage]) -> Iterator[LoadPoint]:
    for stage in sorted(stages, key=lambda stage: stage.token_rate_per_user or 0.0):
        if stage.token_rate_per_user is not None and stage.token_rate_per_device is not None:
            per_user, per_device = stage.token_rate_per_user, stage.token_rate_per_device
            text = f"{stage.label}: {digits(per_user)} tokens/s per user, {digits(per_device)} per device"
            yield LoadPoint(per_user, per_device, None, None, short_label(stage), text)


def _load(stage: ServingStage) -> tuple[bool, float]:
    return stage.concurrency is None, stage.concurrency or stage.rate or 0.0


def short_label(stage: ServingStage) -> str:
    """Return the concurrency or rate of a stage, for the label of a point."""
    if stage.concurrency is not None:
        return str(stage.concurrency)
    return f"{stage.rate:.3g}/s" if stage.rate is not None else ""


def slo_text(slo: Slo) -> str:
    """Return an SLO in words."""
    limits = [
        f"{title} ≤ {limit:g} ms"
        for title, limit in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("end to end", slo.e2e_ms))
        if limit is not None
    ]
    return f"{', '.join(limits)} for {percent(slo.share, 3)} of the requests" if limits else "none"


def _facts(serving: ServingRound) -> Iterator[tuple[str, str]]:
    yield ("Server", serving.server) if serving.server else ("Endpoint", serving.endpoint or "")
    if serving.command:
        yield "Command line", " ".join(serving.command)
    yield "Model in requests", f"{serving.served_model or NOTHING} ({serving.api})"
    yield "Devices of the server", str(serving.num_devices)
    yield (
        "Length of answers",
        "pinned to the requested number of tokens" if serving.output_length == "pinned" else "natural",
    )
    yield "Tokens counted by", "the model's own tokenizer" if serving.has_tokenizer else "the server (usage)"
    yield "SLO", slo_text(serving.slo)
    answers, prompts = serving.answers, serving.prompts
    if answers.agreement is not None:
        yield (
            "Agreement",
            (
                f"{percent(answers.agreement, 4)} of the tokens of {answers.num_compared} answers under load, from their start, "
                f"equal the framework's greedy answers (at least {percent(answers.min_agreement, 4)} required)"
            ),
        )
    yield "Prompts", f"{prompts.num_unique:,} different in {prompts.num_requests:,} requests"
    lags = [stage for stage in serving.stages if stage.lag_p99_ms is not None]
    if lags:
        worst = max(lags, key=lambda stage: stage.lag_p99_ms or 0.0)
        busiest = max(stage.client_cpu_share for stage in serving.stages)
        yield (
            "Client",
            (
                f"timers at most {digits(worst.lag_p99_ms or 0.0, 3)} ms late (p99, {worst.label}), "
                f"busiest process {percent(busiest)} of a core"
            ),
        )
