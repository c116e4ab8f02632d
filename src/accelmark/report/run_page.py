"""The page of a run: one self-contained HTML file that needs no network; first all cases, then served models."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.explain.entries import all_terms
from accelmark.report import charts
from accelmark.report.tables import adaptation_rows
from accelmark.report.templating import page
from accelmark.results import schema
from accelmark.results.cluster import scaling_curves
from accelmark.results.figures import FIGURE_GROUPS, HEADLINES, FigureName, format_figure, title_of, unit_of
from accelmark.results.prices import Prices, costs_of, units_per_epoch
from accelmark.results.rounds.summary import NARROW
from accelmark.results.schema import CaseResult, Quantile, RoundResult, ServingRound, ServingStage, Spread
from accelmark.results.store.bundle import update_manifest
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun, load_run
from accelmark.results.tuning import tuned_result
from accelmark.spec.key import CaseKey
from accelmark.spec.log.inference import TokenScenarioResult
from accelmark.spec.number_format import NOTHING, digits, limit_percent, percent, quantity, scale_of, subtracted

F = FigureName
_NUM_TILES: Final = 6
_MARKS: Final = {
    "open": "open: immutable settings may have been changed",
    "synthetic": "synthetic data",
    "made_up_data": "made-up data",
    "speed_only": "speed only: the case states no target",
    "partial": "partial: did not run to its end",
    "partial_evaluation": "evaluated on part of the data",
    "busy_machine": "busy machine",
    "resumed": "resumed",
    "bad_samples": "unreadable samples were replaced",
    "edited": "files edited",
}


def _case(anchor: str, case: LoadedCase, prices: Prices | None, *, alone: bool) -> dict[str, Any]:
    result, first, rounds, key = case.result, case.first, case.rounds, case.result.key
    title = functools.partial(title_of, unit=result.unit, metric=first.metric_title if first else None)
    known = {name: spread for name, spread in result.figures.items() if spread.mean is not None}
    columns = [name for name in HEADLINES if any(entry.value_of(name) is not None for entry in rounds)][:_NUM_TILES]
    is_unreliable = result.is_timing_unreliable
    tiles = [name for name in HEADLINES if name in known and not (is_unreliable and name.info.unit.endswith("/s"))]
    missing: dict[str, list[str]] = {}
    for name in sorted(result.figures.keys() - known.keys(), key=list(FigureName).index):
        missing.setdefault(result.figures[name].reason or "no round succeeded", []).append(title(name))
    groups = [
        (group, [_row(title(name), name, result, rounds) for name in names if name in known])
        for group, names in FIGURE_GROUPS.items()
    ]
    epoch, num_devices = (units_per_epoch(first), first.num_devices) if first else (None, 1)
    costs = costs_of(prices, result.task, result.unit, key.hardware, num_devices, result.mean_of, epoch)
    same = {"explanation": "at the prices of the reader", "interval": NOTHING, "wide": False}
    same["rounds"] = [NOTHING] * len(rounds)
    groups.append(("Cost", [same | {"title": cost.title, "value": cost.text} for cost in costs]))
    settings: dict[bool, list[tuple[str, Any]]] = {True: [], False: []}
    for setting_name, setting in sorted(first.settings.items()) if first else ():
        is_changed = setting.layer != "default" and Path(setting.layer).name != "case.yaml"
        settings[is_changed].append((setting_name, setting))
    listed = [
        {
            "result": entry,
            "cells": [format_figure(name, entry.value_of(name), entry.unit) for name in columns],
            "failed_ranks": [
                (node.host, rank) for node in entry.nodes for rank in node.ranks if rank.state != "succeeded"
            ],
        }
        for entry in rounds
    ]
    hosts = [
        (str(info.get("host", "host")), [(name, text) for name, text in _flat(info) if name != "host"])
        for info in (first.environment.hosts if first else ())
    ]
    return {
        "anchor": anchor,
        "result": result,
        "first": first,
        "scale": scale_text(key, result.variant),
        "label": key.model if alone else f"{key.model} {result.role or result.variant or f'{key.nnodes}x{key.nproc}'}",
        "marks": [_MARKS[mark] for mark in result.marks],
        "target": first.target.text if first and first.target else "",
        "tiles": [_tile(title(name), name, result) for name in tiles[:_NUM_TILES]],
        "missing": missing,
        "groups": [(group, rows) for group, rows in groups if rows],
        "ranks": _rank_table(rounds),
        "hosts": hosts,
        "notes": [(title(name), spread.reason) for name, spread in known.items() if spread.reason],
        "round_heads": [title(name) for name in columns],
        "rounds": listed,
        "settings": list(settings.items()),
        "peak": getattr(first.chip.peaks, first.precision, None) if first and first.chip else None,
        "serving": _serving_view(first),
        "plots": charts.plots_of(rounds),
        "adaptation": adaptation_rows(result.adaptation) if result.adaptation else [],
    }


def scale_text(key: CaseKey, variant: str | None) -> str:
    """Return framework, hardware, and numbers of hosts and ranks of a case."""
    version = f" {key.framework_version}" if key.framework_version else ""
    hosts = "host" if key.nnodes == 1 else "hosts"
    ranks = "rank" if key.world_size == 1 else "ranks"
    scale = f"{key.framework}{version} · {key.hardware} · {key.nnodes} {hosts} · {key.world_size} {ranks}"
    return f"{scale} · {variant}" if variant else scale


def _tile(title: str, name: FigureName, result: CaseResult) -> dict[str, str]:
    spread, metrics = result.figures[name], _metric_texts(result.mean_of)
    scale = scale_of(spread.mean or 0.0, unit_of(name, result.unit))
    if name is F.ENGINE_METRIC and name in metrics:
        note = f"framework {metrics[F.FRAMEWORK_METRIC]} {spread.reason}"
    elif spread.relative_half95 is not None:
        note = f"± {percent(spread.relative_half95)} over {spread.num_rounds} rounds"
    else:
        note = name.info.explanation if spread.num_rounds < 2 else f"{spread.num_rounds} rounds"
    number = metrics.get(name) or scale.number(spread.mean)
    return {"title": title, "number": number, "unit": scale.unit, "note": note}


def _row(title: str, name: FigureName, result: CaseResult, rounds: Sequence[RoundResult]) -> dict[str, Any]:
    spread = result.figures[name]
    scale = scale_of(spread.mean or 0.0, unit_of(name, result.unit))
    return {
        "title": title,
        "explanation": name.info.explanation,
        "value": _metric_texts(result.mean_of).get(name) or format_figure(name, spread.mean, result.unit),
        "interval": interval_text(name, spread),
        "wide": not name.info.is_difference and (spread.relative_half95 or 0.0) > NARROW,
        "rounds": [_metric_texts(entry.value_of).get(name) or scale.number(entry.value_of(name)) for entry in rounds],
    }


def interval_text(name: FigureName, spread: Spread) -> str:
    """Return half the 95 % interval relative to the mean; of a difference, whose mean is near 0, half the interval."""
    if name.info.is_difference and spread.half95 is not None:
        return f"± {digits(spread.half95, 2)}"
    return NOTHING if spread.relative_half95 is None else f"± {percent(spread.relative_half95)}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        title = prefix + (name if name.isupper() else name.replace("_", " "))
        if isinstance(value, dict):
            yield from _flat(value, f"{title} · ")
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _flat(item, f"{title} {position} · ")
            if plain := [str(item) for item in value if not isinstance(item, dict)]:
                yield title, ", ".join(plain)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = f"{value:,}" if isinstance(value, int) else digits(value)
            yield title.removesuffix(" mib"), quantity(value, "MiB") if title.endswith(" mib") else number
        elif value is not None:
            yield title, str(value)


def _rank_table(rounds: Sequence[RoundResult]) -> dict[str, Any] | None:
    """Return the slowest ranks of the round whose slowest rank cost most; None where no round has several ranks."""
    from accelmark.results.rounds.training import MAX_SHARE, straggler_text  # imports NumPy

    measured = [(result.round, times) for result in rounds if (times := result.rank_times) is not None]
    if not measured:
        reason = next((result.rank_times_unknown for result in rounds if result.rank_times_unknown), None)
        unknown = {"text": f"The slowest rank is not known: {reason}.", "is_slow": False, "rows": [], "num_ranks": 0}
        return None if reason is None else unknown
    number, times = max(measured, key=lambda entry: entry[1].straggler.share if entry[1].straggler is not None else 0.0)
    slow, where = times.straggler, f"Round {number}: " if len(rounds) > 1 else ""
    none = f"no rank costs the others more than {limit_percent(MAX_SHARE)} of a step"
    text = none if slow is None else straggler_text(slow)
    slowest = sorted(times.ranks, key=lambda rank: rank.busy_ms, reverse=True)[:16]
    rows = [
        (rank.rank, rank.host, list(map(digits, (rank.data_wait_ms, rank.own_ms, rank.wait_ms, rank.step_ms))))
        for rank in slowest
    ]
    text = where + (text if where else text[0].upper() + text[1:]) + "."
    return {"text": text, "is_slow": slow is not None, "rows": rows, "num_ranks": len(times.ranks)}


def ranking(run: LoadedRun) -> tuple[str, list[tuple[float | None, str, CaseResult]]] | None:
    """Return the rules of a run and its cases as (FLOP/s, anchor, case): VALID ones first, the fastest first.

    Model FLOP/s are those of all devices over the whole training time. None for a run without rules.
    """
    titles = [case.first.rules for case in run.cases if case.first is not None and case.first.rules is not None]
    if not titles:
        return None
    rows: list[tuple[float | None, str, CaseResult]] = []
    for number, (_, case) in enumerate(run.cases, start=1):
        achieved, steady = case.mean_of(F.ACHIEVED_TFLOPS), case.mean_of(F.THROUGHPUT_PER_DEVICE)
        whole = case.mean_of(F.THROUGHPUT_WHOLE)
        flops = 1e12 * achieved / steady * whole if achieved and steady and whole else None
        rows.append((flops, f"case-{number}", case))
    return titles[0], sorted(rows, key=lambda row: (row[2].verdict == "VALID", row[0] or 0.0), reverse=True)


_ENGINE_COLUMNS: Final = (
    ("{metric}, engine", F.ENGINE_METRIC), ("{metric}, framework", F.FRAMEWORK_METRIC),
    ("Engine minus framework", F.METRIC_DIFFERENCE),
    ("Core, items/s", F.INFERENCE_CORE), ("Whole, items/s", F.INFERENCE_WHOLE), ("p50, ms", F.LATENCY_P50),
    ("p90, ms", F.LATENCY_P90), ("p99, ms", F.LATENCY_P99), ("p99.9, ms", F.LATENCY_P999),
    ("First call, ms", F.FIRST_CALL), ("Compilation, s", F.COMPILE_TIME), ("MFU", F.MFU),
    ("MFU, measured ceiling", F.MFU_MEASURED),
)  # fmt: skip


def _inference(run: LoadedRun) -> dict[str, Any] | None:
    """Return the values of ``run/inference.html``, without columns that no case has; None without inference."""
    listed = [
        (f"case-{number}", case.result, first, first.inference)
        for number, case in enumerate(run.without_trials, start=1)
        if (first := case.first) is not None and first.inference is not None
    ]
    if not listed:
        return None
    columns = {head: name for head, name in _ENGINE_COLUMNS if any(row[1].mean_of(name) is not None for row in listed)}
    metrics = {row[2].metric_title or "metric" for row in listed}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    engines = [
        (" ".join(filter(None, (case.key.model, case.role, case.variant))), inference)
        for _, case, _, inference in listed
    ]
    rows: list[tuple[Any, ...]] = []
    for row in listed:
        case = row[1]
        cells, metrics_of = [], _metric_texts(case.mean_of)
        for name in columns.values():
            spread, mean = case.figures.get(name), case.mean_of(name)
            few = 3 if name is F.COMPILE_TIME else 4
            shown = NOTHING if mean is None else percent(mean, 3) if name is F.MFU else digits(mean, few)
            cells.append((metrics_of.get(name, shown), (spread.reason if spread else None) or ""))
        core, base = case.mean_of(F.INFERENCE_CORE), case.mean_of(F.VALIDATION_CORE)
        rows.append((*row, cells, f"{digits(core / base, 3)}×" if core and base else NOTHING))
    return {
        "heads": [head.format(metric=metric[:1].upper() + metric[1:]) for head in columns],
        "rows": rows,
        "chart": charts.latency_chart([(name, inference.latency_curve) for name, inference in engines]),
        "steps": [(name, _steps(inference)) for name, inference in engines],
    }


def _metric_texts(value_of: Callable[[F], float | None]) -> dict[F, str]:
    """Return the metrics of engine and framework and their difference, so that the first two give the third."""
    engine, framework = value_of(F.ENGINE_METRIC), value_of(F.FRAMEWORK_METRIC)
    if engine is None or framework is None:
        return {}
    names = (F.ENGINE_METRIC, F.FRAMEWORK_METRIC, F.METRIC_DIFFERENCE)
    return dict(zip(names, subtracted(engine, framework), strict=True))


def _steps(inference: schema.InferenceRound) -> list[str]:
    """Return the duration or reason of each of the seven steps."""
    lines: list[str] = []
    for stage in {stage.step: stage for stage in inference.stages}.values():
        took, why = f"{stage.duration_s:.2f} s", f"({stage.reason})"
        states = {"skipped": f"skipped {why}", "failed": f"failed after {took} {why}", "done": took}
        lines.append(f"{stage.number} {stage.step}: {states[stage.state]}")
    return lines


def render_page(run: LoadedRun, prices: Prices | None = None) -> str:
    """Return the page of a run as HTML, with costs at ``prices``; all values in it are escaped."""
    listed = run.without_trials
    models = Counter(case.result.key.model for case in listed)
    cases = [
        _case(f"case-{number}", case, prices, alone=models[case.result.key.model] == 1)
        for number, case in enumerate(listed, start=1)
    ]
    name = re.sub(r"[-_]+", " ", re.sub(r"^\d{8}T\d{6}Z-", "", run.summary.run)).strip() or run.summary.run
    day = f", {datetime.fromisoformat(run.summary.started_at):%-d %b %Y}" if run.summary.started_at else ""
    return page(
        "run/run.html", "run/run.js", charts=True, title=f"{name[:1].upper()}{name[1:]}{day}",
        version=run.summary.accelmark_version, run=run, summary=run.summary, cases=cases,
        rules=all_terms()["audit rule"], tuned=tuned_result(run.summary, run.rounds), ranking=ranking(run),
        inference=_inference(run), scaling=[(curve, charts.scaling_chart(curve)) for curve in scaling_curves([run])],
        data=charts.embed_json({case["anchor"]: case["plots"] for case in cases}),
    )  # fmt: skip


def write_page(run_dir: Path, output: Path | None = None, prices: Prices | None = None) -> Path:
    """Write the page of a run that has a summary, by default as ``report.html`` in its directory; return its path."""
    path = output or run_dir / "report.html"
    write_atomic(path, render_page(load_run(run_dir), prices))
    if path.resolve().is_relative_to(run_dir.resolve()):
        update_manifest(run_dir, path.resolve().relative_to(run_dir.resolve()).as_posix())
    return path


_TITLES: Final = {
    "ttft": "TTFT", "sent_to_first": "Sent to first token", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end",
    "queued": "Due to sent", "server_queue": "In the server's queue",
}  # fmt: skip
_FACTS: Final = {
    "quantisation": "Quantisation",
    "kv_cache_type": "Type of the KV cache",
    "speculative_decoding": "Speculative decoding",
}
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


def _serving_view(result: RoundResult | None) -> dict[str, Any] | None:
    """Return the values of ``run/serving.html`` for a round; None for other tasks."""
    if result is None or result.serving is None:
        return None
    serving = result.serving
    headline, columns = serving.headline_stage, list(_columns(serving))
    measured = [stage for stage in serving.stages if stage.window_s is not None]
    distributions = []
    for name in ("ttft", "tpot", "itl", "e2e"):
        curves = [(stage.label, stage.latencies[name].curve) for stage in measured if name in stage.latencies]
        if (chart := charts.latency_chart(curves, "the samples")) is not None:
            distributions.append((_TITLES[name], chart))
    return {
        "round": result.round,
        "serving": serving,
        "columns": columns,
        "rows": [
            {
                "label": stage.label, "is_headline": stage.stage == serving.headline, "is_search": stage.is_search,
                "cells": [cells[place] for _, _, cells in columns],
            }
            for place, stage in enumerate(serving.stages)
        ],
        "headline": headline.label if headline else "",
        "latencies": [
            {
                "title": title, "explanation": schema.LATENCIES[name], "samples": f"{spread.count:,}",
                "cells": [_shown(spread.quantiles[share]) for share in schema.PERCENTILES if share in spread.quantiles],
            }
            for name, title in _TITLES.items()
            if headline and (spread := headline.latencies.get(name))
        ],
        "percentiles": list(schema.PERCENTILES),
        "tradeoffs": list(_tradeoffs(measured)),
        "distributions": distributions,
        "timeline": charts.timeline_chart(serving.timeline, headline.window_s if headline else None),
        "facts": list(_facts(serving)),
    }  # fmt: skip


def _columns(serving: ServingRound) -> Iterator[tuple[str, str, list[Cell]]]:
    """Yield head, explanation and cells of each column of the table; those without any value are left out."""
    stages = serving.stages

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

    def field(name: str) -> list[Cell]:
        values = [getattr(stage, name) for stage in stages]
        if name.endswith(("mfu", "mbu")):
            return [Cell(NOTHING if value is None else percent(value, 3)) for value in values]
        return [_number(value) for value in values]

    def is_known(name: str) -> bool:
        return any(getattr(stage, name) is not None for stage in stages)

    behind = ("the server fell behind" if stage.is_saturated else "" for stage in stages)
    rates = [cell._replace(note=note) for cell, note in zip(field("request_rate"), behind, strict=True)]
    yield "Window, s", "Steady state, since the stage began", [*map(window, stages)]
    yield "Requests", "Due in the window; without a window, in the whole stage", [*map(requests, stages)]
    yield "Failed", "Requests of the whole stage", [*map(failed, stages)]
    yield "Requests/s", "Answered in the window", rates
    yield "Tokens/s", "Output tokens", field("output_token_rate")
    if serving.num_devices > 1:
        yield "Tokens/s per device", "Output tokens", field("token_rate_per_device")
    yield from ((head, note, field(name)) for head, note, name in _GENERATION if is_known(name))
    yield "Tokens/s per user", "1 / median TPOT", field("token_rate_per_user")
    for name in ("ttft", "tpot"):
        pairs = [_pair(stage.latencies.get(name)) for stage in stages]
        yield f"{_TITLES[name]} p50 · p99, ms", "Median and 99th percentile", pairs
    yield "ITL p99, ms", "99th percentile", [_number(stage.quantile("itl", "p99")) for stage in stages]
    if is_known("slo_share"):
        yield "In SLO", "Share of the requests that held all limits", [*map(slo_share, stages)]
        yield "Goodput/s", "Requests that held all limits", field("goodput")
    if is_known("tokens_per_joule"):
        yield "Tokens/J", "Output tokens per joule", field("tokens_per_joule")
    law = "Mean number of requests in the window; by Little's law on hover"
    yield "In progress", law, [*map(in_progress, stages)]


def _number(value: float | None, significant: int = 4, note: str = "") -> Cell:
    return Cell(NOTHING if value is None else digits(value, significant), note)


def _pair(distribution: schema.Distribution | None) -> Cell:
    """Return median and p99, with their intervals on hover."""
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


def _tradeoffs(stages: Sequence[ServingStage]) -> Iterator[tuple[str, str, charts.Chart]]:
    kinds = " Filled: open load." if len({stage.concurrency is None for stage in stages}) > 1 else ""
    stages = sorted(stages, key=lambda stage: (stage.concurrency is None, stage.concurrency or stage.rate or 0.0))
    last = {stage.lengths: stage for stage in stages}
    by_latency: dict[tuple[str, str], list[charts.LoadPoint]] = {(name, share): [] for name, share, *_ in _TRADEOFF}
    by_user: list[charts.LoadPoint] = []
    for stage in stages:
        load, rate, end = stage.short_label, stage.output_token_rate, (stage.concurrency is None, stage.lengths)
        if stage.lengths and len(last) > 1 and last[stage.lengths] is stage:
            load = f"{load} ({stage.lengths})"  # at the last point of each line
        highest = "p99" if stage.quantile("ttft", "p99") is not None else "p50"
        for (name, share), points in by_latency.items():
            quantile = stage.latencies[name].quantiles.get(share) if name in stage.latencies else None
            if quantile is not None and quantile.value is not None and rate is not None:
                text = f"{stage.label}: {_TITLES[name]} {share} {digits(quantile.value)} ms at {digits(rate)} tokens/s"
                label = load if (name, share) == ("ttft", highest) else ""
                points.append(charts.LoadPoint(rate, quantile.value, limits_of(quantile), label, text, *end))
        per_user, per_device = stage.token_rate_per_user, stage.token_rate_per_device
        if per_user is not None and per_device is not None:
            text = f"{stage.label}: {digits(per_user)} tokens/s per user, {digits(per_device)} per device"
            by_user.append(charts.LoadPoint(per_user, per_device, None, load, text, *end))
    latencies = [
        charts.LoadCurve(f"{_TITLES[name]} {share}", number, dash, by_latency[name, share])
        for name, share, number, dash in _TRADEOFF
    ]
    if latency := charts.tradeoff_chart(latencies, "output tokens/s", "Latency", is_latency=True):
        lead = f"One point per stage, with 95 % intervals; better to the lower right.{kinds}"
        yield "Throughput and latency", lead, latency
    rates, x = [charts.LoadCurve("stages", 0, "solid", by_user)], "output tokens/s per user"
    if pareto := charts.tradeoff_chart(rates, x, "Output tokens/s per device", is_latency=False):
        yield "Speed for one user and for the device", f"One point per stage; better to the upper right.{kinds}", pareto


def limits_of(quantile: Quantile) -> tuple[float, float] | None:
    """Return the interval of a percentile; None where it has no limit on a side."""
    return (quantile.low, quantile.high) if quantile.low is not None and quantile.high is not None else None


def _scenario_text(result: TokenScenarioResult) -> str:
    if result.tokens_per_second is None:
        return f"no figure: {result.reason or 'LoadGen reported none'}"
    verdict = "VALID" if result.valid else f"INVALID: {result.reason or 'see its log'}"
    parts = [f"{digits(result.tokens_per_second)} tokens/s", f"{digits(result.queries_per_second or 0.0)} queries/s"]
    limits = (("TTFT", result.ttft_ms, result.ttft_limit_ms), ("TPOT", result.tpot_ms, result.tpot_limit_ms))
    for title, percentiles, limit in limits:
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
    slo = serving.slo
    named = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "end to end": slo.e2e_ms}
    limits = ", ".join(f"{title} ≤ {limit:g} ms" for title, limit in named.items() if limit is not None)
    yield "SLO", f"{limits} for {percent(slo.share, 3)} of the requests" if limits else "none"
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
