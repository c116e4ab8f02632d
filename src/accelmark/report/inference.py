"""The inference section of a run's page: engines by precision and batch with their accuracy, and latency curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from accelmark.results.figures.definitions import FigureName
from accelmark.results.schema import CaseResult, RoundResult
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.number_format import NOTHING, digits, percent

F = FigureName

WIDTH: Final = 720
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
_NINES: Final = ((0.0, "0 %"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"))
_MOST_SHARE: Final = 0.9995
_COLOURS: Final = 6
_COLUMNS: Final = (
    ("Accuracy", F.INFERENCE_METRIC), ("Framework accuracy", F.VALIDATION_METRIC), ("Difference", F.METRIC_DIFFERENCE),
    ("Core, items/s", F.INFERENCE_CORE), ("Whole, items/s", F.INFERENCE_WHOLE), ("p50, ms", F.LATENCY_P50),
    ("p90, ms", F.LATENCY_P90), ("p99, ms", F.LATENCY_P99), ("p99.9, ms", F.LATENCY_P999),
    ("First call, ms", F.FIRST_CALL), ("Compilation, s", F.COMPILE_TIME), ("MFU", F.MFU),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine at one precision and batch."""

    anchor: str
    model: str
    engine: str
    precision: str
    batch: int
    verdict: str
    cells: tuple[tuple[str, str], ...]
    """(value, note or reason why there is none) in the order of the columns."""
    speedup: str
    """Core throughput relative to the framework's own."""


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """Latency over the share of batches, as points of an SVG polyline."""

    label: str
    colour: int
    """1 to 6, the page's line colours."""
    dashes: str
    points: str


@final
@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis: position and label."""

    at: float
    label: str


@final
@dataclass(frozen=True, slots=True)
class LatencyPlot:
    """All curves on common axes: share of batches in nines (x), logarithmic milliseconds (y)."""

    curves: tuple[Curve, ...]
    shares: tuple[Tick, ...]
    latencies: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM
    top: int = _TOP


@final
@dataclass(frozen=True, slots=True)
class InferenceView:
    """The inference section of a page."""

    heads: tuple[str, ...]
    rows: tuple[EngineRow, ...]
    plot: LatencyPlot | None
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    """(label, duration or reason of each of the seven steps)."""


def inference_view(run: LoadedRun) -> InferenceView | None:
    """Return the inference section of a run, None where it has no inference case."""
    found = [
        (f"case-{number}", case, rounds[0])
        for number, case in enumerate(run.summary.cases, start=1)
        if case.task == "infer" and (rounds := run.rounds_of(case)) and rounds[0].inference is not None
    ]
    if not found:
        return None
    return InferenceView(
        heads=tuple(head for head, _ in _COLUMNS),
        rows=tuple(_row(*entry) for entry in found),
        plot=latency_plot([(_label(case), result) for _, case, result in found]),
        steps=tuple((_label(case), _steps(result)) for _, case, result in found),
    )


def _label(case: CaseResult) -> str:
    return f"{case.key.model} {case.variant or ''}".strip()


def _row(anchor: str, case: CaseResult, result: RoundResult) -> EngineRow:
    inference = result.inference
    assert inference is not None  # noqa: S101 - checked by the caller
    means = {name: spread.mean for name, spread in case.figures.items()}
    cells = []
    for _, name in _COLUMNS:
        spread = case.figures.get(name)
        mean = means.get(name)
        shown = NOTHING if mean is None else percent(mean, 3) if name is F.MFU else digits(mean)
        cells.append((shown, (spread.reason if spread is not None else None) or ""))
    core, base = means.get(F.INFERENCE_CORE), means.get(F.VALIDATION_CORE)
    return EngineRow(
        anchor=anchor,
        model=case.key.model,
        engine=inference.compiler or "framework only",
        precision=result.precision,
        batch=inference.batch_size,
        verdict=case.verdict,
        cells=tuple(cells),
        speedup=f"{digits(core / base, 3)}×" if core and base else NOTHING,
    )


def _steps(result: RoundResult) -> tuple[str, ...]:
    inference = result.inference
    assert inference is not None  # noqa: S101
    ended = {stage.step: stage for stage in inference.stages}
    lines: list[str] = []
    for step, stage in ended.items():
        if stage.state == "skipped":
            lines.append(f"{stage.number} {step}: skipped ({stage.reason})")
        elif stage.state == "failed":
            lines.append(f"{stage.number} {step}: failed after {stage.duration_s:.2f} s ({stage.reason})")
        else:
            lines.append(f"{stage.number} {step}: {stage.duration_s:.2f} s")
    return tuple(lines)


def latency_plot(results: Sequence[tuple[str, RoundResult]]) -> LatencyPlot | None:
    """Return the latency curves of labelled rounds on common axes; None where no latency is above zero."""
    curves = [
        (label, result.inference.latency_curve)
        for label, result in results
        if result.inference is not None and len(result.inference.latency_curve) > 1
    ]
    values = [latency for _, curve in curves for _, latency in curve if latency > 0]
    if not values:
        return None
    low, high = min(values), max(values)
    low, high = low / 1.1, high * 1.1

    def x(share: float) -> float:
        nines = -math.log10(1 - min(share, _MOST_SHARE)) / -math.log10(1 - _MOST_SHARE)
        return round(_LEFT + nines * (WIDTH - _LEFT - _RIGHT), 1)

    def y(latency_ms: float) -> float:
        rise = math.log(max(latency_ms, low) / low) / math.log(high / low)
        return round(HEIGHT - _BOTTOM - rise * (HEIGHT - _TOP - _BOTTOM), 1)

    return LatencyPlot(
        curves=tuple(
            Curve(
                label=label,
                colour=number % _COLOURS + 1,
                dashes=("none", "7 4", "2 3", "9 3 2 3")[number // _COLOURS % 4],
                points=" ".join(f"{x(share)},{y(latency)}" for share, latency in curve),
            )
            for number, (label, curve) in enumerate(curves)
        ),
        shares=tuple(Tick(x(share), label) for share, label in _NINES),
        latencies=tuple(Tick(y(value), f"{value:g}") for value in _latency_ticks(low, high)),
    )


def _latency_ticks(low: float, high: float) -> list[float]:
    """Return ticks between two bounds: 1, 2 and 5 of each decade, or equal steps where that gives fewer than two."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [mantissa * 10.0**exponent for exponent in exponents for mantissa in (1, 2, 5)]
    found = [value for value in decades if low <= value <= high]
    if len(found) > 1:
        return found
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
