"""Data of the plots on a run's page; the page's script adds axes and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypedDict

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
_PERCENTILES: Final = (("p50", FigureName.STEP_P50), ("p90", FigureName.STEP_P90), ("p99", FigureName.STEP_P99))


class Line(TypedDict):
    """One line of a panel; ``round`` selects its colour, ``text`` is shown on hover."""

    label: str
    round: int
    x: list[float]
    y: list[float | None]
    text: list[str]


class Panel(TypedDict):
    """A plot over time; all panels share the time axis."""

    title: str
    unit: str
    lines: list[Line]
    markers: bool
    level: float | None
    """Horizontal line at the target."""
    from_zero: bool


class Bars(TypedDict):
    """A histogram: bin edges (one more than counts), and (name, value) of the percentiles."""

    label: str
    round: int
    edges: list[float]
    counts: list[int]
    marks: list[tuple[str, float]]


def plots_of(rounds: Sequence[RoundResult]) -> dict[str, Any]:
    """Return the plots over time and the histograms of a case as JSON values."""
    shown = [result for result in rounds if result.curves][:_MAX_ROUNDS]
    return {
        "progress": list(_progress(shown)),
        "telemetry": list(_telemetry(shown)),
        "bars": [bars for bars in map(_bars, shown) if bars["counts"]],
        "left_out": max(len(rounds) - len(shown), 0),
    }


def _panel(
    title: str, unit: str, lines: list[Line], *, markers: bool = False, level: float | None = None, zero: bool = False
) -> Panel:
    return Panel(title=title, unit=unit, lines=lines, markers=markers, level=level, from_zero=zero)


def _progress(rounds: Sequence[RoundResult]) -> Iterable[Panel]:
    if not rounds:
        return
    target = rounds[0].target
    names = dict.fromkeys(name for result in rounds for name in result.curves if name not in {"loss", "throughput"})
    yield _panel("Loss", "", _lines(rounds, "loss"))
    for name in names:
        level = target.value if target and target.metric == name else None
        yield _panel(name.replace("_", " ").capitalize(), "", _lines(rounds, name), markers=True, level=level)
    yield _panel("Throughput", f"{rounds[0].unit}s/s", _lines(rounds, "throughput"), zero=True)


def _lines(rounds: Sequence[RoundResult], name: str) -> list[Line]:
    most = max(_MAX_POINTS // len(rounds), 100)
    return [_line(result, result.curves[name], most) for result in rounds if result.curves.get(name)]


def _line(result: RoundResult, points: Sequence[Point], most: int) -> Line:
    import numpy as np

    from accelmark.results.figures.curves import thin

    values = np.array([point.value for point in points], dtype=np.float64)
    kept = [points[index] for index in thin(values, most)]
    return Line(
        label=f"round {result.round}",
        round=result.round,
        x=[point.time_s for point in kept],
        y=[point.value for point in kept],
        text=[f"step {point.step:,}" for point in kept],
    )


def _telemetry(rounds: Sequence[RoundResult]) -> Iterable[Panel]:
    """Yield the telemetry of one round: the first that succeeded, else the first."""
    chosen = next((result for result in rounds if result.state == "succeeded"), rounds[0] if rounds else None)
    if chosen is None:
        return
    note = f", round {chosen.round}" if len(rounds) > 1 else ""
    for name, title, unit, factor in _TELEMETRY:
        lines = [_telemetry_line(one, factor, chosen.round) for one in chosen.telemetry if one.quantity == name]
        if lines:
            yield _panel(title + note, unit, lines, zero=name != "temperature")


def _telemetry_line(series: TelemetrySeries, factor: float, number: int) -> Line:
    return Line(
        label=series.label,
        round=number,
        x=[at for at, _ in series.points],
        y=[None if value is None else round(value * factor, 4) for _, value in series.points],
        text=[],
    )


def _bars(result: RoundResult) -> Bars:
    figures = ((label, result.figures.get(name)) for label, name in _PERCENTILES)
    return Bars(
        label=f"round {result.round}",
        round=result.round,
        edges=[edge for edge, _ in result.step_ms_histogram],
        counts=[count for _, count in result.step_ms_histogram[1:]],
        marks=[(label, figure.value) for label, figure in figures if figure and figure.value is not None],
    )
