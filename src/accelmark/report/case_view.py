"""Present the cases of a run for the template of its page: titles, rows, tiles and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, final

from accelmark.report.plots import plots_of
from accelmark.results.figure_names import FIGURES, FigureName, format_figure, title_of, unit_of
from accelmark.results.figures.aggregate import NARROW
from accelmark.results.schema import AdaptationCost, CaseResult, Finding, RoundResult, Spread
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.job import RankExit
from accelmark.spec.key import CaseKey
from accelmark.spec.number_format import NOTHING, digits, percent, quantity, scale_of

F = FigureName
HEADLINES: Final = (
    F.THROUGHPUT_TRAIN, F.TIME_TO_TARGET, F.FINAL_METRIC, F.INFERENCE_CORE, F.INFERENCE_METRIC, F.LATENCY_P50,
    F.LATENCY_P99, F.MFU, F.ENERGY_PER_UNIT, F.VALIDATION_CORE, F.PEAK_DEVICE_MEMORY, F.STEP_P50, F.DATA_WAIT_SHARE,
    F.RAW_TRAIN_TIME, F.COMPILE_TIME, F.PEAK_HOST_MEMORY, F.FINAL_LOSS,
)  # fmt: skip
"""Figures for the tiles in order of preference; figures without a value are skipped."""
NUM_TILES: Final = 6
_ROUNDING: Final = 1e-9

GROUPS: Final = (
    ("Outcome", (F.FINAL_METRIC, F.FINAL_LOSS, F.TIME_TO_TARGET)),
    ("Search", (F.SEARCH_SCORE, F.SEARCH_REGULATED_SCORE, F.SEARCH_HELD_OUT_ERROR, F.SEARCH_VALIDATION_ERROR,
                F.SEARCH_IDLE_SHARE, F.SEARCH_TRIALS, F.SEARCH_IMAGES, F.SEARCH_OPERATIONS, F.SEARCH_TIME)),
    ("Throughput", (F.THROUGHPUT_WHOLE, F.THROUGHPUT_TRAIN, F.THROUGHPUT_CORE, F.THROUGHPUT_PER_DEVICE)),
    ("Inference", (F.INFERENCE_CORE, F.INFERENCE_WHOLE, F.VALIDATION_CORE, F.VALIDATION_WHOLE)),
    ("Accuracy", (F.INFERENCE_METRIC, F.VALIDATION_METRIC, F.METRIC_DIFFERENCE, F.REPEAT_SPEEDUP,
                  F.DECLARED_SHARE)),
    ("Latency", (F.LATENCY_P50, F.LATENCY_P90, F.LATENCY_P99, F.LATENCY_P999, F.FIRST_CALL)),
    ("Scenarios", (F.OFFLINE_RATE, F.SINGLE_STREAM_LATENCY, F.MULTI_STREAM_LATENCY, F.SERVER_RATE)),
    ("Time", (F.E2E_TIME, F.VALIDATION_TIME, F.EXPORT_TIME, F.COMPILE_TIME, F.INFERENCE_TIME,
              F.INIT_TIME, F.RAW_TRAIN_TIME, F.TRAIN_NO_EVAL_TIME, F.PURE_COMPUTE_TIME, F.STEP_P50,
              F.STEP_P90, F.STEP_P99, F.DATA_WAIT_SHARE)),
    ("Computation", (F.MFU, F.MFU_MEASURED, F.ACHIEVED_TFLOPS, F.FLOPS_PER_SAMPLE, F.FLOPS_PER_ITEM)),
    ("Memory and utilisation", (F.PEAK_DEVICE_MEMORY, F.DEVICE_MEMORY_TOTAL, F.PEAK_HOST_MEMORY,
                                F.DEVICE_UTILISATION, F.CPU_UTILISATION)),
    ("Power and energy", (F.MEAN_POWER, F.ENERGY, F.ENERGY_PER_UNIT, F.UNITS_PER_JOULE, F.TELEMETRY_CPU_TIME)),
)  # fmt: skip

_MARKS: Final = {
    "open": "open: immutable settings may have been changed",
    "synthetic": "synthetic data",
    "partial": "partial: did not run to its end",
    "partial_evaluation": "evaluated on part of the data",
    "busy_machine": "busy machine",
    "resumed": "resumed",
}


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """The unit and the target metric of a case, which are part of figures' titles."""

    unit: str
    metric: str | None

    def title(self, name: FigureName) -> str:
        """Return the title of a figure; the final metric has the name of the target's metric."""
        if name is F.FINAL_METRIC and self.metric:
            return f"Final {self.metric.replace('_', ' ')}"
        return title_of(name, self.unit)


@final
@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure."""

    title: str
    number: str
    unit: str
    note: str


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the table."""

    title: str
    explanation: str
    value: str
    interval: str
    """Half the relative 95 % interval."""
    wide: bool
    rounds: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class RoundView:
    """One round of a case."""

    number: int
    state: str
    converged: str
    reason: str
    started_at: str
    cells: tuple[str, ...]
    failed_ranks: tuple[tuple[str, RankExit], ...]
    """(host, rank) that failed, with their last lines of output."""


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting."""

    name: str
    value: str
    layer: str
    replaced: str
    forced: bool
    changed: bool
    """Whether a layer above the case set it."""


@final
@dataclass(frozen=True, slots=True)
class CaseView:
    """One case on the page."""

    anchor: str
    title: str
    label: str
    """Title, with scale or variant where several cases on the page have the same title."""
    scale: str
    key: str
    verdict: str
    state: str
    reasons: tuple[str, ...]
    marks: tuple[str, ...]
    target: str
    tiles: tuple[Tile, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    missing: tuple[tuple[str, tuple[str, ...]], ...]
    """(reason, titles of the figures without a value for that reason)."""
    notes: tuple[tuple[str, str], ...]
    """(title of a figure, note on its value)."""
    round_heads: tuple[str, ...]
    rounds: tuple[RoundView, ...]
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...]
    adaptation: AdaptationCost | None
    environment: tuple[tuple[str, str], ...]
    hosts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    settings: tuple[Setting, ...]
    plots: dict[str, Any]


_ROUND_COLUMNS: Final = (F.THROUGHPUT_TRAIN, F.STEP_P50, F.RAW_TRAIN_TIME, F.FINAL_METRIC, F.FINAL_LOSS, F.ENERGY)


def case_views(run: LoadedRun) -> tuple[CaseView, ...]:
    """Return one view for each case of a run, in the run's order."""
    models = [case.key.model for case in run.summary.cases]
    return tuple(
        _case(number, case, run.rounds_of(case), _label(case, alone=models.count(case.key.model) == 1))
        for number, case in enumerate(run.summary.cases, start=1)
    )


def _label(case: CaseResult, *, alone: bool) -> str:
    """Return the shortest name that is unique on the page."""
    if alone:
        return case.key.model
    return f"{case.key.model} {case.variant or f'{case.key.nnodes}x{case.key.nproc}'}"


def _case(number: int, case: CaseResult, rounds: Sequence[RoundResult], label: str) -> CaseView:
    first = rounds[0] if rounds else None
    unit = case.unit
    terms = Terms(unit, str(first.target["metric"]) if first and first.target else None)
    known = {name: spread for name, spread in case.figures.items() if spread.mean is not None}
    columns = [name for name in _ROUND_COLUMNS if any(_value(result, name) is not None for result in rounds)]
    return CaseView(
        anchor=f"case-{number}",
        title=case.key.model,
        label=label,
        scale=scale_text(case.key, case.variant),
        key=str(case.key),
        verdict=case.verdict,
        state=case.state,
        reasons=case.reasons,
        marks=tuple(_MARKS[mark] for mark in case.marks),
        target=_target(first),
        tiles=tuple(_tile(name, known[name], terms) for name in HEADLINES if name in known)[:NUM_TILES],
        groups=_groups(known, rounds, terms),
        missing=_missing(case, known, terms),
        notes=tuple((terms.title(name), spread.reason) for name, spread in known.items() if spread.reason),
        round_heads=tuple(terms.title(name) for name in columns),
        rounds=tuple(_round(result, columns) for result in rounds),
        warnings=case.warnings,
        findings=case.findings,
        adaptation=case.adaptation,
        environment=tuple(_environment(first)) if first else (),
        hosts=tuple(_hosts(first)) if first else (),
        settings=tuple(_settings(first)) if first else (),
        plots=plots_of(rounds),
    )


def scale_text(key: CaseKey, variant: str | None) -> str:
    """Return framework, hardware, and numbers of hosts and ranks of a case."""
    version = f" {key.framework_version}" if key.framework_version else ""
    hosts = "host" if key.nnodes == 1 else "hosts"
    ranks = "rank" if key.world_size == 1 else "ranks"
    scale = f"{key.framework}{version} · {key.hardware} · {key.nnodes} {hosts} · {key.world_size} {ranks}"
    return f"{scale} · {variant}" if variant else scale


def _value(result: RoundResult, name: FigureName) -> float | None:
    found = result.figures.get(name)
    return found.value if found else None


def _target(result: RoundResult | None) -> str:
    if result is None or result.target is None:
        return ""
    sign = {"at_least": "≥", "at_most": "≤"}[result.target["direction"]]
    return f"{result.target['metric'].replace('_', ' ')} {sign} {result.target['value']:g}"


def _tile(name: FigureName, spread: Spread, terms: Terms) -> Tile:
    scale = scale_of(spread.mean or 0.0, unit_of(name, terms.unit))
    half = half_interval(spread)
    if half is not None:
        note = f"± {percent(half)} over {spread.num_rounds} rounds"
    else:
        note = FIGURES[name].explanation if spread.num_rounds < 2 else f"{spread.num_rounds} rounds"
    return Tile(terms.title(name), scale.number(spread.mean), scale.unit, note)


def half_interval(spread: Spread) -> float | None:
    """Return half the 95 % interval relative to the mean."""
    if spread.ci95 is None or not spread.mean:
        return None
    return relative_half((spread.ci95[1] - spread.ci95[0]) / 2, spread.mean)


def relative_half(half: float, mean: float) -> float:
    """Return half an interval relative to the mean; a rounding error of equal values is 0."""
    share = half / abs(mean)
    return share if share > _ROUNDING else 0.0


def _missing(
    case: CaseResult, known: Mapping[FigureName, Spread], terms: Terms
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the figures without a value, grouped by reason."""
    found: dict[str, list[str]] = {}
    for name in FigureName:
        if name in case.figures and name not in known:
            found.setdefault(case.figures[name].reason or "no round succeeded", []).append(terms.title(name))
    return tuple((why, tuple(titles)) for why, titles in found.items())


def _groups(
    known: dict[FigureName, Spread], rounds: Sequence[RoundResult], terms: Terms
) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    groups: list[tuple[str, tuple[Row, ...]]] = []
    for title, names in GROUPS:
        rows = tuple(_row(name, known[name], rounds, terms) for name in names if name in known)
        if rows:
            groups.append((title, rows))
    return tuple(groups)


def _row(name: FigureName, spread: Spread, rounds: Sequence[RoundResult], terms: Terms) -> Row:
    half = half_interval(spread)
    scale = scale_of(spread.mean or 0.0, unit_of(name, terms.unit))
    return Row(
        title=terms.title(name),
        explanation=FIGURES[name].explanation,
        value=format_figure(name, spread.mean, terms.unit),
        interval=NOTHING if half is None else f"± {percent(half)}",
        wide=half is not None and half > NARROW,
        rounds=tuple(scale.number(_value(result, name)) for result in rounds),
    )


def _round(result: RoundResult, columns: Sequence[FigureName]) -> RoundView:
    answers = {True: "yes", False: "no", None: NOTHING}
    return RoundView(
        number=result.round,
        state=result.state.replace("_", " "),
        converged=answers[result.converged],
        reason=result.reason or "",
        started_at=result.started_at.replace("T", " ").replace("Z", " UTC").replace(".000", ""),
        cells=tuple(format_figure(name, _value(result, name), result.unit) for name in columns),
        failed_ranks=tuple(
            (node.host, rank) for node in result.nodes for rank in node.ranks if rank.state != "succeeded"
        ),
    )


def _environment(result: RoundResult) -> Iterable[tuple[str, str]]:
    started = result.environment.started
    chip = result.chip
    if chip is not None:
        peak = getattr(chip.peaks, result.precision, None)
        yield "Chip", f"{chip.name} {chip.variant}".strip()
        yield "Dense peak", f"{quantity(peak, 'TFLOP/s')} {result.precision}" if peak else "not stated"
        yield "Peak source", chip.source
    yield "Vendor", result.vendor
    yield "Precision", result.precision
    yield "Steps", f"{result.num_steps:,}"
    yield "Samples", f"{result.num_samples:,}"
    named = {
        "device_name": "Device", "framework": "Framework", "framework_version": "Framework version",
        "world_size": "Ranks", "threads": "Threads per rank", "model_class": "Model", "optimizer_class": "Optimizer",
        "num_parameters": "Parameters", "parameter_hash": "Model structure hash",
        "checkpoint_hash": "Initial weights hash",
    }  # fmt: skip
    for name, title in named.items():
        if started.get(name) is not None:
            value = started[name]
            yield title, f"{value:,}" if isinstance(value, int) else str(value)
    hooks = started.get("hooks") or {}
    yield "Vendor hooks", "; ".join(f"{hook} ({where})" for hook, where in hooks.items()) or "none"
    if compiled := result.environment.compiled:
        yield "Compiled", f"{compiled['graphs']} graphs, {compiled['graph_breaks']} graph breaks"
    if kernels := started.get("attention_kernels"):
        yield "Attention kernel", ", ".join(kernels)
    libraries = started.get("library_versions") or {}
    if libraries:
        yield "Libraries", ", ".join(f"{name} {version}" for name, version in sorted(libraries.items()))
    yield "Case version", str(result.case_version)


def _hosts(result: RoundResult) -> Iterable[tuple[str, tuple[tuple[str, str], ...]]]:
    for info in result.environment.hosts:
        rows = [(name, text) for name, text in _flat(info) if name != "host"]
        yield str(info.get("host", "host")), tuple(rows)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        title = prefix + (name if name.isupper() else name.replace("_", " "))
        if isinstance(value, dict):
            yield from _flat(value, f"{title} · ")
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _flat(item, f"{title} {position} · ")
            plain = [str(item) for item in value if not isinstance(item, dict)]
            if plain:
                yield title, ", ".join(plain)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield _amount(title, value)
        elif value is not None:
            yield title, str(value)


def _amount(title: str, value: float) -> tuple[str, str]:
    if title.endswith(" mib"):
        return title.removesuffix(" mib"), quantity(value, "MiB")
    return title, f"{value:,}" if isinstance(value, int) else digits(value)


def _settings(result: RoundResult) -> Iterable[Setting]:
    for name, setting in sorted(result.settings.items()):
        yield Setting(
            name=name,
            value=_plain(setting.value),
            layer=setting.layer,
            replaced=", ".join(f"{_plain(value)} ({layer})" for layer, value in reversed(setting.replaced)),
            forced=setting.forced,
            changed=setting.layer != "default" and PurePath(setting.layer).name != "case.yaml",
        )


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "null" if value is None else str(value)
