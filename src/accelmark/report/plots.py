"""Data of the plots on a run's page as JSON values; the page's script adds axes and colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from accelmark.results.figures import FigureName
from accelmark.results.schema import Point, RoundResult

_MAX_ROUNDS: Final = 12
_MAX_POINTS: Final = 4000
"""Points of one panel over all rounds; beyond that, each round is downsampled."""

_MARGIN: Final = 0.25
_LEAST_MARGIN_S: Final = 2.0
"""Time before and after the curves of which telemetry is drawn: a share of theirs, and the least."""

_TELEMETRY: Final = (
    ("utilisation", "Device utilisation", "%", 100.0),
    ("power", "Power", "W", 1.0),
    ("memory", "Device memory", "GiB", 1 / 1024),
    ("temperature", "Temperature", "°C", 1.0),
    ("clock", "Clock", "MHz", 1.0),
    ("cpu", "CPU utilisation", "%", 100.0),
    ("rank_memory", "Memory of the ranks", "GiB", 1 / 1024),
    ("host_memory", "Host memory", "GiB", 1 / 1024),
)
_PERCENTILES: Final = (("p50", FigureName.STEP_P50), ("p90", FigureName.STEP_P90), ("p99", FigureName.STEP_P99))


Json = dict[str, Any]


def plots_of(rounds: Sequence[RoundResult]) -> Json:
    """Return the plots of a case: panels over time, which share the time axis, and histograms.

    A panel has lines and, at the target, a level. The number of a line's round selects its colour, its text is shown on
    hover. A histogram has one more edge than counts, and marks at percentiles.
    """
    shown = [result for result in rounds if result.curves][:_MAX_ROUNDS]
    is_serving = any(result.serving for result in shown)
    return {
        "time": "time since the first stage began" if is_serving else "raw training time",
        "progress": list(_progress(shown)),
        "telemetry": list(_telemetry(shown)),
        "bars": [bars for bars in map(_bars, shown) if bars["counts"]],
        "left_out": max(len(rounds) - len(shown), 0),
    }


def _panel(title: str, unit: str, lines: list[Json], **options: Any) -> Json:
    return {"title": title, "unit": unit, "lines": lines, "markers": False, "level": None, "from_zero": False} | options


def _progress(rounds: Sequence[RoundResult]) -> Iterable[Json]:
    if not rounds:
        return
    target = rounds[0].target
    names = dict.fromkeys(name for result in rounds for name in result.curves if name not in {"loss", "throughput"})
    if losses := _lines(rounds, "loss"):
        yield _panel("Loss", "", losses)
    for name in names:
        level = target.value if target and target.metric == name else None
        is_load = any(result.serving for result in rounds)
        lines = _lines(rounds, name)
        yield _panel(
            name.replace("_", " ").capitalize(), "", lines, markers=not is_load, level=level, from_zero=is_load
        )
    yield _panel("Throughput", f"{rounds[0].unit}s/s", _lines(rounds, "throughput"), from_zero=True)


def _lines(rounds: Sequence[RoundResult], name: str) -> list[Json]:
    most = max(_MAX_POINTS // len(rounds), 100)
    found = [
        (result.round, "stage" if result.serving else "step", _kept(result.curves[name], most))
        for result in rounds
        if result.curves.get(name)
    ]
    return [
        {
            "label": f"round {number}",
            "round": number,
            "x": [point.time_s for point in points],
            "y": [point.value for point in points],
            "text": [f"{word} {point.step:,}" for point in points],
        }
        for number, word, points in found
    ]


def _kept(points: Sequence[Point], most: int) -> list[Point]:
    import numpy as np

    from accelmark.results.rounds.curves import thin

    return [points[index] for index in thin(np.array([point.value for point in points], dtype=np.float64), most)]


def _telemetry(rounds: Sequence[RoundResult]) -> Iterable[Json]:
    """Yield the telemetry of one round, the first that succeeded, else the first, without that of a long start."""
    chosen = next((result for result in rounds if result.state == "succeeded"), rounds[0] if rounds else None)
    if chosen is None:
        return
    note = f", round {chosen.round}" if len(rounds) > 1 else ""
    end_s = max((points[-1].time_s for points in chosen.curves.values() if points), default=0.0)
    margin_s = max(_MARGIN * end_s, _LEAST_MARGIN_S)
    for name, title, unit, factor in _TELEMETRY:
        lines: list[Json] = [
            {
                "label": series.label,
                "round": chosen.round,
                "x": [at for at, _ in points],
                "y": [None if value is None else round(value * factor, 4) for _, value in points],
                "text": [],
            }
            for series in chosen.telemetry
            if series.quantity == name
            and (points := [point for point in series.points if -margin_s <= point[0] <= end_s + margin_s])
        ]
        if lines:
            yield _panel(title + note, unit, lines, from_zero=name != "temperature")


def _bars(result: RoundResult) -> Json:
    figures = ((label, result.figures.get(name)) for label, name in _PERCENTILES)
    return {
        "label": f"round {result.round}",
        "round": result.round,
        "edges": [edge for edge, _ in result.step_ms_histogram],
        "counts": [count for _, count in result.step_ms_histogram[1:]],
        "marks": [(label, figure.value) for label, figure in figures if figure and figure.value is not None],
    }
