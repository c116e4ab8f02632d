"""The page of a run: one self-contained HTML file that needs no network."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from accelmark.explain.entries import all_terms
from accelmark.report.charts import embed_json, latency_chart, plots_of, scaling_chart
from accelmark.report.serving_page import serving_view
from accelmark.report.tables import adaptation_rows
from accelmark.report.templating import page
from accelmark.results.figures import FIGURE_GROUPS, HEADLINES, FigureName, format_figure, title_of, unit_of
from accelmark.results.prices import Prices, costs_of, units_per_epoch
from accelmark.results.rounds.summary import NARROW
from accelmark.results.scaling import scaling_curves
from accelmark.results.schema import CaseResult, InferenceRound, RoundResult, Spread
from accelmark.results.store.bundle import update_manifest
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun, load_run
from accelmark.results.tuning import tuned_result
from accelmark.spec.key import CaseKey
from accelmark.spec.number_format import NOTHING, digits, limit_percent, percent, quantity, scale_of, subtracted

F = FigureName
_STAMP: Final = re.compile(r"^\d{8}T\d{6}Z-")
"""Start of a run's directory name."""
_NUM_TILES: Final = 6
_MAX_RANKS: Final = 16
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
    """Return the values of a case in ``run/run.html``."""
    result, first, rounds, key = case.result, case.first, case.rounds, case.result.key
    title = functools.partial(title_of, unit=result.unit, metric=first.metric_title if first else None)
    known = {name: spread for name, spread in result.figures.items() if spread.mean is not None}
    columns = [name for name in HEADLINES if any(entry.value_of(name) is not None for entry in rounds)][:_NUM_TILES]
    tiles = [
        name
        for name in HEADLINES
        if name in known and not (result.is_timing_unreliable and name.info.unit.endswith("/s"))
    ]
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
    return {
        "anchor": anchor,
        "label": key.model if alone else f"{key.model} {result.role or result.variant or f'{key.nnodes}x{key.nproc}'}",
        "result": result,
        "first": first,
        "scale": scale_text(key, result.variant),
        "marks": [_MARKS[mark] for mark in result.marks],
        "target": first.target.text if first and first.target else "",
        "tiles": [_tile(title(name), name, result) for name in tiles[:_NUM_TILES]],
        "groups": [(group, rows) for group, rows in groups if rows],
        "missing": missing,
        "notes": [(title(name), spread.reason) for name, spread in known.items() if spread.reason],
        "round_heads": [title(name) for name in columns],
        "rounds": [
            {
                "result": entry,
                "cells": [format_figure(name, entry.value_of(name), entry.unit) for name in columns],
                "failed_ranks": [
                    (node.host, rank) for node in entry.nodes for rank in node.ranks if rank.state != "succeeded"
                ],
            }
            for entry in rounds
        ],
        "peak": getattr(first.chip.peaks, first.precision, None) if first and first.chip else None,
        "hosts": [
            (str(info.get("host", "host")), [(name, text) for name, text in _flat(info) if name != "host"])
            for info in (first.environment.hosts if first else ())
        ],
        "ranks": _rank_table(rounds),
        "serving": serving_view(first),
        "settings": list(settings.items()),
        "adaptation": adaptation_rows(result.adaptation) if result.adaptation else [],
        "plots": plots_of(rounds),
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
    """Return the slowest ranks of the round whose slowest rank cost most; None where no round has several ranks.

    A row has rank, host, wait for data, own computation, wait for other ranks, and step, in ms.
    """
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
    slowest = sorted(times.ranks, key=lambda rank: rank.busy_ms, reverse=True)[:_MAX_RANKS]
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
    """Return the values of ``run/inference.html``, None where the run has no inference case.

    A row has an engine at one precision and batch: cells of (value, note or reason why there is none), and its core
    throughput relative to the framework's own. A column that no case has is left out.
    """
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
    return {
        "heads": [head.format(metric=metric[:1].upper() + metric[1:]) for head in columns],
        "rows": [(*row, *_engine_cells(row[1], columns.values())) for row in listed],
        "chart": latency_chart([(name, inference.latency_curve) for name, inference in engines]),
        "steps": [(name, _steps(inference)) for name, inference in engines],
    }


def _engine_cells(case: CaseResult, names: Iterable[FigureName]) -> tuple[list[tuple[str, str]], str]:
    cells, metrics = [], _metric_texts(case.mean_of)
    for name in names:
        spread, mean = case.figures.get(name), case.mean_of(name)
        few = 3 if name is F.COMPILE_TIME else 4
        shown = NOTHING if mean is None else percent(mean, 3) if name is F.MFU else digits(mean, few)
        cells.append((metrics.get(name, shown), (spread.reason if spread else None) or ""))
    core, base = case.mean_of(F.INFERENCE_CORE), case.mean_of(F.VALIDATION_CORE)
    return cells, f"{digits(core / base, 3)}×" if core and base else NOTHING


def _metric_texts(value_of: Callable[[F], float | None]) -> dict[F, str]:
    """Return the metrics of engine and framework and their difference, so that the first two give the third."""
    engine, framework = value_of(F.ENGINE_METRIC), value_of(F.FRAMEWORK_METRIC)
    if engine is None or framework is None:
        return {}
    names = (F.ENGINE_METRIC, F.FRAMEWORK_METRIC, F.METRIC_DIFFERENCE)
    return dict(zip(names, subtracted(engine, framework), strict=True))


def _steps(inference: InferenceRound) -> list[str]:
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
    name = re.sub(r"[-_]+", " ", _STAMP.sub("", run.summary.run)).strip() or run.summary.run
    day = f", {datetime.fromisoformat(run.summary.started_at):%-d %b %Y}" if run.summary.started_at else ""
    return page(
        "run/run.html", "run/run.js", charts=True, title=f"{name[:1].upper()}{name[1:]}{day}",
        version=run.summary.accelmark_version, run=run, summary=run.summary, cases=cases,
        rules=all_terms()["audit rule"], tuned=tuned_result(run.summary, run.rounds), ranking=ranking(run),
        inference=_inference(run), scaling=[(curve, scaling_chart(curve)) for curve in scaling_curves([run])],
        data=embed_json({case["anchor"]: case["plots"] for case in cases}),
    )  # fmt: skip


def write_page(run_dir: Path, output: Path | None = None, prices: Prices | None = None) -> Path:
    """Write the page of a run that has a summary, by default as ``report.html`` in its directory; return its path."""
    path = output or run_dir / "report.html"
    write_atomic(path, render_page(load_run(run_dir), prices))
    if path.resolve().is_relative_to(run_dir.resolve()):
        update_manifest(run_dir, path.resolve().relative_to(run_dir.resolve()).as_posix())
    return path
