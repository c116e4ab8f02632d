"""Data of the plots on a run's page; the page's script adds axes and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from accelmark.results.figure_names import FigureName
from accelmark.results.schema import Point, RoundResult, TelemetrySeries

_MAX_ROUNDS: Final = 12
_MAX_POINTS: Final = 4000
"""Points of one panel over all rounds; beyond that, each round is downsampled."""

_TELEMETRY: Final = (
    ("utilisation", "Device utilisation", "%", 100.0),
    ("power", "Power", "W", 1.0),
    ("memory", "Device memory", "GiB", 1 / 1024),
    ("temperature", "Temperature", "°C", 1.0),
    ("clock", "Clock", "MHz", 1.0),
    ("cpu", "CPU utilisation", "%", 100.0),
    ("host_memory", "Host memory", "GiB", 1 / 1024),
)


@final
@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel; ``round`` selects its colour, ``text`` is shown on hover."""

    label: str
    round: int
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    text: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """A plot over time; all panels share the time axis."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    markers: bool = False
    level: float | None = None
    """Horizontal line at the target."""
    from_zero: bool = False


@final
@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: bin edges (one more than counts)."""

    label: str
    round: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    marks: tuple[tuple[str, float], ...]
    """(name, value) of the percentiles."""


def plots_of(rounds: Sequence[RoundResult]) -> dict[str, Any]:
    """Return the plots over time and the histograms of a case as JSON values."""
    shown = [result for result in rounds if result.curves][:_MAX_ROUNDS]
    return {
        "progress": [asdict(panel) for panel in _progress(shown)],
        "telemetry": [asdict(panel) for panel in _telemetry(shown)],
        "bars": [asdict(bars) for bars in (_bars(result) for result in shown) if bars.counts],
        "left_out": max(len(rounds) - len(shown), 0),
    }


def _progress(rounds: Sequence[RoundResult]) -> Iterable[Panel]:
    if not rounds:
        return
    unit = rounds[0].unit
    target = rounds[0].target
    names = dict.fromkeys(name for result in rounds for name in result.curves if name not in {"loss", "throughput"})
    yield Panel("Loss", "", _lines(rounds, "loss"))
    for name in names:
        level = float(target["value"]) if target and target["metric"] == name else None
        yield Panel(name.replace("_", " ").capitalize(), "", _lines(rounds, name), markers=True, level=level)
    yield Panel("Throughput", f"{unit}s/s", _lines(rounds, "throughput"), from_zero=True)


def _lines(rounds: Sequence[RoundResult], name: str) -> tuple[Line, ...]:
    most = max(_MAX_POINTS // len(rounds), 100)
    shown = [result for result in rounds if result.curves.get(name)]
    return tuple(_line(result, [*_downsampled(result.curves[name], most)]) for result in shown)


def _line(result: RoundResult, points: Sequence[Point]) -> Line:
    return Line(
        label=f"round {result.round}",
        round=result.round,
        x=tuple(point.time_s for point in points),
        y=tuple(point.value for point in points),
        text=tuple(f"step {point.step:,}" for point in points),
    )


def _downsampled(points: Sequence[Point], most: int) -> Iterable[Point]:
    """Yield at most about ``most`` points: minimum and maximum of each interval."""
    if len(points) <= most:
        yield from points
        return
    size = -(-2 * len(points) // most)
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = [point for point in stretch if point.value is not None]
        ends = {id(p): p for p in (min(known, key=_height), max(known, key=_height))} if known else {0: stretch[0]}
        yield from sorted(ends.values(), key=lambda point: point.step)


def _height(point: Point) -> float:
    return point.value or 0.0


def _telemetry(rounds: Sequence[RoundResult]) -> Iterable[Panel]:
    """Yield the telemetry of one round: the first that succeeded, else the first."""
    chosen = next((result for result in rounds if result.state == "succeeded"), rounds[0] if rounds else None)
    if chosen is None:
        return
    note = f", round {chosen.round}" if len(rounds) > 1 else ""
    for name, title, unit, factor in _TELEMETRY:
        series = [entry for entry in chosen.telemetry if entry.quantity == name]
        if series:
            lines = tuple(_telemetry_line(entry, factor, chosen.round) for entry in series)
            yield Panel(title + note, unit, lines, from_zero=name != "temperature")


def _telemetry_line(series: TelemetrySeries, factor: float, number: int) -> Line:
    return Line(
        label=series.label,
        round=number,
        x=tuple(at for at, _ in series.points),
        y=tuple(None if value is None else round(value * factor, 4) for _, value in series.points),
    )


def _bars(result: RoundResult) -> Bars:
    edges = tuple(edge for edge, _ in result.step_ms_histogram)
    counts = tuple(count for _, count in result.step_ms_histogram[1:])
    names = (("p50", FigureName.STEP_P50), ("p90", FigureName.STEP_P90), ("p99", FigureName.STEP_P99))
    marks = tuple(
        (label, value) for label, name in names if (value := result.figures[name].value) is not None
    )  # fmt: skip
    return Bars(f"round {result.round}", result.round, edges, counts, marks)
