"""Charts as data of Plotly: traces and layout, in which ``--NAME`` is a colour of the style sheet (``charts.js``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from accelmark.results.cluster import ScalingCurve
from accelmark.results.figures import FigureName
from accelmark.results.schema import RoundResult, TimelineRequest
from accelmark.spec.log.records import CollectiveTiming
from accelmark.spec.number_format import digits, percent, quantity, scale_of

Json = dict[str, Any]

_COLOURS: Final = 6
"""Line colours of the style sheet."""
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_SHARES: Final = ((0.0, "0 %"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"))


class Chart(NamedTuple):
    """A chart of a page."""

    label: str
    """What it shows, for screen readers."""
    traces: list[Json]
    layout: Json

    @property
    def data(self) -> Markup:
        """The chart as JSON for a script element."""
        return embed_json({"traces": self.traces, "layout": self.layout})


def embed_json(value: Any) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704 - escaped


def _colour(number: int) -> str:
    return f"--r{number % _COLOURS + 1}"


def line(x: Sequence[Any], y: Sequence[Any], name: str, number: int, **options: Any) -> Json:
    """Return a line in the colour and dashes of its ``number`` from 0."""
    style = {"color": _colour(number), "width": 1.8, "dash": _DASHES[number // _COLOURS % len(_DASHES)]}
    trace = {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": escape(name), "line": style}
    return trace | options


def titled(text: str, **axis: Any) -> Json:
    """Return an axis with a title."""
    return {"title": {"text": escape(text)}} | axis


def _texts(texts: Iterable[str]) -> Json:
    """Return the text of each point on hover."""
    return {"text": [escape(text) for text in texts], "hovertemplate": "%{text}<extra></extra>"}


def _interval(values: Sequence[float], limits: Sequence[tuple[float, float] | None], shade: str) -> Json:
    """Return the error bars of points; None: without an interval."""
    ends = [limit or (value, value) for value, limit in zip(values, limits, strict=True)]
    return {
        "type": "data", "symmetric": False, "color": shade, "thickness": 1, "width": 0,
        "array": [high - value for value, (_, high) in zip(values, ends, strict=True)],
        "arrayminus": [value - low for value, (low, _) in zip(values, ends, strict=True)],
    }  # fmt: skip


def _around(values: Sequence[float], halves: Sequence[float | None]) -> list[tuple[float, float] | None]:
    return [(value - half, value + half) if half else None for value, half in zip(values, halves, strict=True)]


def _edge(x: float) -> Json:
    style = {"color": "--bad", "width": 1, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": style}


def scaling_chart(curve: ScalingCurve) -> Chart:
    """Draw scaling efficiency over ranks (logarithmic) with the ideal line and 95 % intervals."""
    points = curve.points
    ranks, shares = [point.ranks for point in points], [point.efficiency for point in points]
    rates = (f"{digits(point.throughput)} {curve.unit}s/s" for point in points)
    texts = (f"{at.scale}: {percent(at.efficiency, 3)}, {rate}" for at, rate in zip(points, rates, strict=True))
    measured = line(ranks, shares, "efficiency", 0, mode="lines+markers", **_texts(texts))
    measured["error_y"] = _interval(shares, _around(shares, [point.half95 for point in points]), _colour(0))
    dots = {"color": "--soft", "dash": "dot"}
    ideal = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": dots}
    x = titled("hosts × devices per host", type="log", tickvals=ranks, ticktext=[point.scale for point in points])
    y = titled("efficiency", tickformat=".0%", rangemode="tozero")
    label = f"Scaling efficiency of {curve.model} on {curve.chip}; values in the table below"
    return Chart(label, [measured], {"xaxis": x, "yaxis": y, "shapes": [ideal]})


def trend_chart(
    points: Sequence[tuple[str, float, float]], segments: Sequence[tuple[int, int, float]], unit: str, title: str
) -> Chart:
    """Draw a figure over runs, and the level of each segment (first run, run after the last, mean).

    A point has the start of its run, the value, and half its 95 % interval or 0.
    """
    scale = scale_of(max(abs(value) for _, value, _ in points), unit)
    shown = [value / scale.divisor for _, value, _ in points]
    halves = [half / scale.divisor for _, _, half in points]
    texts = (f"{started_at}: {quantity(value, unit)}" for started_at, value, _ in points)
    runs = line(range(len(points)), shown, title, 0, mode="lines+markers", **_texts(texts))
    runs["error_y"] = _interval(shown, _around(shown, halves), _colour(0))
    shapes: list[Json] = []
    for begin, end, level in segments if len(points) >= 4 else ():  # change points need two runs on each side
        height = level / scale.divisor
        span = {"x0": begin - 0.2, "x1": end - 0.8, "y0": height, "y1": height}
        shapes.append({"type": "line", "line": {"color": _colour(1), "width": 2}} | span)
        shapes += [_edge(begin - 0.5)] if begin else []
    places = range(0, len(points), max(1, math.ceil(len(points) / 7)))
    days = [points[place][0][:16].replace("T", "<br>") for place in places]
    unit_text = f"{title}, {scale.unit}" if scale.unit else title
    layout = {"xaxis": {"tickvals": list(places), "ticktext": days}, "yaxis": titled(unit_text), "shapes": shapes}
    return Chart(f"{title} over time; values in the table below", [runs], layout)


def latency_chart(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], samples: str = "batches"
) -> Chart | None:
    """Draw labelled curves of (share of the samples, latency in ms): shares in nines (x), logarithmic latency (y).

    Returns None where no latency is above zero.
    """

    def nines(share: float) -> float:
        return -math.log10(1 - min(share, 0.9995))

    curves = [(label, curve) for label, curve in curves if len(curve) > 1]
    if not any(latency > 0 for _, curve in curves for _, latency in curve):
        return None
    traces = []
    for number, (label, curve) in enumerate(curves):
        texts = _texts(f"{label}: {percent(share, 4)} within {digits(latency)} ms" for share, latency in curve)
        x, y = [nines(share) for share, _ in curve], [latency if latency > 0 else None for _, latency in curve]
        traces.append(line(x, y, label, number, **texts))
    ticks = {"tickvals": [nines(share) for share, _ in _SHARES], "ticktext": [text for _, text in _SHARES]}
    layout = {"xaxis": titled(f"share of {samples}", **ticks), "yaxis": titled("latency, ms", type="log")}
    return Chart(f"Latency in milliseconds over the share of {samples}; percentiles in the table above", traces, layout)


def collectives_chart(sweep: Sequence[CollectiveTiming]) -> Chart | None:
    """Draw the bus bandwidth of each collective over the size of its buffer, both logarithmic; None without timings."""
    traces: list[Json] = []
    for number, name in enumerate(dict.fromkeys(timing.operation for timing in sweep)):
        timings, title = [timing for timing in sweep if timing.operation == name], name.replace("_", "-")
        texts = (f"{title}, {size_text(timing.size_bytes)}: {quantity(timing.bus_gb_s, 'GB/s')}" for timing in timings)
        sizes, rates = [timing.size_bytes for timing in timings], [timing.bus_gb_s for timing in timings]
        traces.append(line(sizes, rates, title, number, mode="lines+markers", **_texts(texts)))
    if not traces:
        return None
    sizes = sorted({timing.size_bytes for timing in sweep})
    sizes = sizes[:: max(1, math.ceil(len(sizes) / 8))]
    axis = titled("size of the buffer", type="log", tickvals=sizes, ticktext=[size_text(size) for size in sizes])
    layout = {"xaxis": axis, "yaxis": titled("bus bandwidth, GB/s", type="log")}
    return Chart("Bus bandwidth over size; values in the table below", traces, layout)


def size_text(num_bytes: int) -> str:
    """Return the size of a buffer in the largest binary unit: ``256 KiB``."""
    exponent = min(3, (max(num_bytes, 1).bit_length() - 1) // 10)
    return f"{num_bytes / 2 ** (10 * exponent):.4g} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


class LoadPoint(NamedTuple):
    """One stage in a trade-off: ``label`` is drawn next to the point, ``text`` shown on hover."""

    x: float
    y: float
    limits: tuple[float, float] | None
    """The 95 % interval of ``y``."""
    label: str
    text: str
    is_open: bool
    """Whether the stage had an open load, which is drawn as a filled point."""
    lengths: str
    """Lengths of prompts and answers where stages differ in them; stages of other lengths are on separate lines."""


class LoadCurve(NamedTuple):
    """Stages; a line joins stages of one kind of load (closed, open) and the same lengths."""

    label: str
    number: int
    """Of its colour, from 0."""
    dash: str
    points: Sequence[LoadPoint]


def tradeoff_chart(curves: Sequence[LoadCurve], x_title: str, y_title: str, *, is_latency: bool) -> Chart | None:
    """Draw curves over a rate (x); ``is_latency``: y is in ms and logarithmic. Returns None without a point."""
    traces: list[Json] = []
    for curve in curves:
        lines: dict[tuple[bool, str], list[LoadPoint]] = {}
        for point in curve.points:
            lines.setdefault((point.is_open, point.lengths), []).append(point)
        for place, ((is_open, _), points) in enumerate(lines.items()):
            x, y = [point.x for point in points], [point.y for point in points]
            trace = line(x, y, curve.label, curve.number, mode="lines+markers", legendgroup=escape(curve.label))
            trace["line"]["dash"] = curve.dash
            trace["marker"] = {"symbol": "circle" if is_open else "circle-open", "size": 8}
            trace["error_y"] = _interval(y, [point.limits for point in points], _colour(curve.number))
            trace["showlegend"] = place == 0 and len(curves) > 1
            traces.append(trace | _texts(point.text for point in points))
    if not traces:
        return None
    log = {"type": "log"} if is_latency else {"rangemode": "tozero"}
    notes = [
        {"x": point.x, "y": math.log10(point.y) if is_latency else point.y, "text": escape(point.label), "yshift": 12,
         "showarrow": False, "font": {"size": 11, "color": "--ink"}}
        for curve in curves for point in curve.points if point.label
    ]  # fmt: skip
    layout = {
        "xaxis": titled(x_title, rangemode="tozero"),
        "yaxis": titled(f"{y_title}, ms" if is_latency else y_title, **log),
        "annotations": notes,
    }
    return Chart(f"{y_title} over {x_title}; values in the table", traces, layout)


_PHASES: Final = (
    ("queued", "queued: due to sent, and in the server's queue where it states that", "--soft"),
    ("waiting", "waiting for the first token", _colour(1)),
    ("decoding", "decoding", _colour(0)),
    ("failed", "failed", "--bad"),
)


def timeline_chart(requests: Sequence[TimelineRequest], window_s: tuple[float, float] | None) -> Chart | None:
    """Draw a row for each request: queued, waiting for the first token, and decoding. Returns None without requests."""
    if not requests or max(request.end_s for request in requests) <= min(request.due_s for request in requests):
        return None
    spans: dict[str, list[Span]] = {}
    for place, request in enumerate(requests):
        sent_s = request.due_s if request.sent_s is None else request.sent_s
        first_s = request.end_s if request.first_s is None else request.first_s
        begun_s = min(sent_s + (request.queue_s or 0.0), first_s)
        took = f"{digits(1000 * (request.end_s - request.due_s), 3)} ms"
        text = f"request {request.number}: {took}, {request.status}"
        ends = {"queued": begun_s, "waiting": first_s, "decoding": request.end_s}
        begin = request.due_s
        for phase, end in ends.items() if request.status == "ok" else [("failed", request.end_s)]:
            spans.setdefault(phase, []).append((place, begin, end - begin, text))
            begin = end
    traces = [bars(spans[phase], title, shade) for phase, title, shade in _PHASES if phase in spans]
    layout = {
        "xaxis": titled("seconds since the stage began"), "yaxis": titled("request", autorange="reversed"),
        "height": min(140 + 10 * len(requests), 620), "shapes": [_edge(edge) for edge in window_s or ()],
    }  # fmt: skip
    return Chart("Timeline of requests: queued, waiting for the first token, decoding", traces, layout)


Span = tuple[Any, float, float, str]
"""A horizontal bar: row, begin, length, text on hover."""


def bars(spans: Iterable[Span], name: str, shade: str) -> Json:
    """Return horizontal bars in one colour."""
    rows, begins, lengths, texts = map(list, zip(*spans, strict=True)) if spans else ([], [], [], [])
    place = {"type": "bar", "orientation": "h", "y": rows, "base": begins, "x": lengths}
    look = {"textposition": "none", "name": escape(name), "marker": {"color": shade, "line": {"width": 0}}}
    return place | look | _texts(texts)


_MAX_ROUNDS: Final = 12
_MAX_POINTS: Final = 4000
"""Points of one panel over all rounds; beyond that, each round is downsampled."""
_MARGIN: Final = 0.25
_LEAST_MARGIN_S: Final = 2.0
"""Telemetry is drawn this long before and after the curves: a share of their duration, and the minimum."""
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


def plots_of(rounds: Sequence[RoundResult]) -> Json:
    """Return the plots of a case: panels over time, which share the time axis, and histograms.

    A panel has lines and, at the target, a level. The number of a line's round selects its colour, its text is shown on
    hover. A histogram has one more edge than counts, and marks at percentiles.
    """
    shown = [result for result in rounds if result.curves][:_MAX_ROUNDS]
    is_serving = any(result.serving for result in shown)
    return {
        "time": "time since the first stage began" if is_serving else "raw training time",
        "progress": _progress(shown, is_serving=is_serving) if shown else [],
        "telemetry": _telemetry(shown) if shown else [],
        "bars": [_histogram(result) for result in shown if len(result.step_ms_histogram) > 1],
        "left_out": max(len(rounds) - len(shown), 0),
    }


def _panel(title: str, unit: str, lines: list[Json], **options: Any) -> Json:
    return {"title": title, "unit": unit, "lines": lines, "markers": False, "level": None, "from_zero": False} | options


def _progress(rounds: Sequence[RoundResult], *, is_serving: bool) -> list[Json]:
    target = rounds[0].target
    losses, names = _lines(rounds, "loss"), dict.fromkeys(name for result in rounds for name in result.curves)
    panels = [_panel("Loss", "", losses)] if losses else []
    for name in [name for name in names if name not in ("loss", "throughput")]:
        level = target.value if target and target.metric == name else None
        title = name.replace("_", " ").capitalize()
        shown = {"markers": not is_serving, "level": level, "from_zero": is_serving}
        panels.append(_panel(title, "", _lines(rounds, name), **shown))
    return [*panels, _panel("Throughput", f"{rounds[0].unit}s/s", _lines(rounds, "throughput"), from_zero=True)]


def _lines(rounds: Sequence[RoundResult], name: str) -> list[Json]:
    import numpy as np

    from accelmark.results.rounds.timeline import thin

    most = max(_MAX_POINTS // len(rounds), 100)
    lines = []
    for result in rounds:
        if curve := result.curves.get(name):
            kept = thin(np.array([point.value for point in curve], dtype=np.float64), most)
            points, word = [curve[index] for index in kept], "stage" if result.serving else "step"
            x, y = [point.time_s for point in points], [point.value for point in points]
            texts = [f"{word} {point.step:,}" for point in points]
            lines.append({"label": f"round {result.round}", "round": result.round, "x": x, "y": y, "text": texts})
    return lines


def _telemetry(rounds: Sequence[RoundResult]) -> list[Json]:
    """Return the telemetry of the first round that succeeded, else of the first round, without a long start."""
    chosen = next((result for result in rounds if result.state == "succeeded"), rounds[0])
    note = f", round {chosen.round}" if len(rounds) > 1 else ""
    end_s = max((points[-1].time_s for points in chosen.curves.values() if points), default=0.0)
    margin_s = max(_MARGIN * end_s, _LEAST_MARGIN_S)
    panels = []
    for name, title, unit, factor in _TELEMETRY:
        lines: list[Json] = []
        for series in (series for series in chosen.telemetry if series.quantity == name):
            inside = [point for point in series.points if -margin_s <= point[0] <= end_s + margin_s]
            if inside:
                x = [at for at, _ in inside]
                y = [None if value is None else round(value * factor, 4) for _, value in inside]
                lines.append({"label": series.label, "round": chosen.round, "x": x, "y": y, "text": []})
        if lines:
            panels.append(_panel(title + note, unit, lines, from_zero=name != "temperature"))
    return panels


def _histogram(result: RoundResult) -> Json:
    figures = ((label, result.figures.get(name)) for label, name in _PERCENTILES)
    return {
        "label": f"round {result.round}",
        "round": result.round,
        "edges": [edge for edge, _ in result.step_ms_histogram],
        "counts": [count for _, count in result.step_ms_histogram[1:]],
        "marks": [(label, figure.value) for label, figure in figures if figure and figure.value is not None],
    }
