"""Charts of a server under load as SVG: trade-offs between rates and latencies, and a timeline of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from typing import Final, NamedTuple

from markupsafe import Markup

from accelmark.report.charts import HALF, KeyedChart, drawing, fitted, grid_line, logarithmic_ticks, text_at, ticks
from accelmark.results.schema import TimelineRequest
from accelmark.spec.number_format import digits

_HEIGHT: Final = 320
_LEFT: Final = 78
_RIGHT: Final = 24
_TOP: Final = 26
_BOTTOM: Final = 46
_ROWS: Final = 480
"""Height of all rows of a timeline."""
_MAX_ROW: Final = 10.0
_CHARACTER: Final = 6.6
"""Mean width of a character of a label."""
_TEXT: Final = 12
"""Height of a label above its base line."""
_POINT: Final = 4


class LoadPoint(NamedTuple):
    """One stage in a trade-off."""

    x: float
    y: float
    low: float | None
    """Limits of the 95 % interval of ``y``."""
    high: float | None
    label: str
    """Drawn next to the point; empty: none."""
    text: str
    """Shown on hover."""
    is_open: bool = False
    """Whether the stage had an open load, which is drawn as a filled point."""
    lengths: str = ""
    """Lengths of prompts and answers where stages differ in them; stages of other lengths are on lines of their own."""


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


class LoadCurve(NamedTuple):
    """Stages; those of one kind of load (closed, open) and of the same lengths are joined by a line."""

    label: str
    colour: int
    """Of the style sheet, from 1."""
    dashes: str
    points: Sequence[LoadPoint]


def tradeoff_chart(curves: Sequence[LoadCurve], x_title: str, y_title: str, *, is_latency: bool) -> KeyedChart | None:
    """Draw curves over a rate (x); ``is_latency``: y is in ms and logarithmic. Returns None without a point."""
    curves = [curve for curve in curves if curve.points]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return None
    right = max(point.x for point in points) * 1.12 or 1.0
    low, high = _bounds(points, is_latency=is_latency)
    y = _scale(low, high, is_latency=is_latency)

    def x(value: float) -> float:
        return _LEFT + (HALF - _LEFT - _RIGHT) * value / right

    marks = logarithmic_ticks(low, high) if is_latency else ticks(low, high)
    unit = " ms" if is_latency else ""
    parts = [grid_line(y(mark), f"{mark:,g}{unit}", HALF) for mark in marks]
    parts += [text_at(x(mark), _HEIGHT - 26, f"{mark:,g}", "middle") for mark in ticks(0.0, right)]
    parts.append(text_at((_LEFT + HALF - _RIGHT) / 2, _HEIGHT - 6, x_title, "middle"))
    parts.append(text_at(_LEFT, _TOP - 10, y_title, "start", "strong-text"))
    for curve in curves:
        parts += _curve(curve, x, y, low)
    parts += _labels([(x(point.x), y(point.y), point.label) for point in points])
    keys = tuple((curve.label, curve.colour, curve.dashes) for curve in curves)
    return KeyedChart(
        drawing(parts, f"{y_title} over {x_title}; values in the table", "chart load", HALF, _HEIGHT), keys
    )


def _bounds(points: Sequence[LoadPoint], *, is_latency: bool) -> tuple[float, float]:
    highest = max(max(point.y, point.high or 0.0) for point in points)
    if not is_latency:
        return 0.0, highest * 1.12 or 1.0
    lowest = min(min(point.y, point.low or point.y) for point in points)
    lowest = max(lowest, highest / 1e6, 1e-6)
    return lowest / 1.15, highest * 1.25


def _scale(low: float, high: float, *, is_latency: bool) -> Callable[[float], float]:
    def rise(value: float) -> float:
        if is_latency:
            return math.log(max(value, low) / low) / math.log(high / low)
        return (value - low) / (high - low)

    return lambda value: _TOP + (1 - rise(value)) * (_HEIGHT - _TOP - _BOTTOM)


def _curve(curve: LoadCurve, x: Callable[[float], float], y: Callable[[float], float], low: float) -> list[str]:
    parts: list[str] = []
    lines: dict[tuple[bool, str], list[str]] = {}
    for point in curve.points:
        lines.setdefault((point.is_open, point.lengths), []).append(f"{x(point.x):.1f},{y(point.y):.1f}")
    parts += (
        f'<polyline class="c{curve.colour}" stroke-dasharray="{curve.dashes}" points="{line}"/>'
        for line in map(" ".join, lines.values())
    )
    for point in curve.points:
        at, level = x(point.x), y(point.y)
        if point.low is not None and point.high is not None:
            ends = f"M{at:.1f},{y(point.high):.1f} V{y(max(point.low, low)):.1f}"
            parts.append(f'<path class="c{curve.colour} interval" d="{ends}"/>')
        title = f"<title>{escape(point.text)}</title>"
        kind = f"c{curve.colour} open" if point.is_open else f"c{curve.colour}"
        parts.append(f'<circle class="{kind}" cx="{at:.1f}" cy="{level:.1f}" r="3.6">{title}</circle>')
    return parts


def _labels(points: Sequence[tuple[float, float, str]]) -> Iterator[str]:
    """Write the label of each point next to it, where it covers no other label and as far as possible no point.

    Args:
        points: place in the drawing (x, y), and label.
    """
    circles = [_Box(at - _POINT, level - _POINT, at + _POINT, level + _POINT) for at, level, _ in points]
    placed: list[_Box] = []
    for at, level, label in points:
        half = _CHARACTER * len(label) / 2
        places = [
            (min(max(at + across, half), HALF - half), level + down)
            for across, down in ((0, -9), (0, 20), (half + 8, 4), (-half - 8, 4), (0, -23), (0, 34))
        ]
        boxes = [_Box(x - half, y - _TEXT, x + half, y + 2) for x, y in places]
        free = [number for number, box in enumerate(boxes) if not any(map(box.overlaps, placed))]
        if label and free:
            chosen = min(free, key=lambda number: sum(map(boxes[number].overlaps, circles)))
            placed.append(boxes[chosen])
            yield text_at(*places[chosen], label, "middle", "halo")


def timeline_chart(requests: Sequence[TimelineRequest], window_s: tuple[float, float] | None) -> Markup | None:
    """Draw a row for each request: queued, waiting for the first token, and decoding. Returns None without requests."""
    if not requests:
        return None
    begin_s = min(request.due_s for request in requests)
    end_s = max(request.end_s for request in requests)
    if end_s <= begin_s:
        return None
    return fitted(partial(_timeline, requests, window_s, begin_s, end_s))


def _timeline(
    requests: Sequence[TimelineRequest],
    window_s: tuple[float, float] | None,
    begin_s: float,
    end_s: float,
    width: int,
) -> Markup:
    row = min(_ROWS / len(requests), _MAX_ROW)
    height = round(_TOP + row * len(requests) + _BOTTOM)

    def x(time_s: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * (time_s - begin_s) / (end_s - begin_s)

    parts = []
    bottom = _TOP + row * len(requests)
    for mark in ticks(begin_s, end_s):
        parts.append(f'<path class="grid" d="M{x(mark):.1f},{_TOP} V{bottom:.1f}"/>')
        parts.append(text_at(x(mark), height - 24, f"{mark:,g} s", "middle"))
    parts.append(text_at((_LEFT + width - _RIGHT) / 2, height - 6, "time since the stage began", "middle"))
    parts.append(text_at(_LEFT - 8, _TOP + 10, f"{requests[0].number}", "end"))
    parts.append(text_at(_LEFT - 8, bottom, f"{requests[-1].number}", "end"))
    for place, request in enumerate(requests):
        parts.append(_row(request, x, _TOP + row * (place + 0.5), max(row - 0.4, 0.8)))
    for edge, anchor, shift in ((window_s[0], "start", 4), (window_s[1], "end", -4)) if window_s else ():
        if begin_s <= edge <= end_s:
            parts.append(f'<path class="change" d="M{x(edge):.1f},{_TOP - 6} V{bottom:.1f}"/>')
            parts.append(text_at(x(edge) + shift, _TOP - 8, "window", anchor))
    label = "Timeline of requests: queued, waiting for the first token, decoding"
    return drawing(parts, label, "chart timeline", width, height)


def _row(request: TimelineRequest, x: Callable[[float], float], level: float, thickness: float) -> str:
    sent_s = request.due_s if request.sent_s is None else request.sent_s
    first_s = request.end_s if request.first_s is None else request.first_s
    begun_s = min(sent_s + (request.queue_s or 0.0), first_s)
    spans = [("queued", request.due_s, begun_s), ("waiting", begun_s, first_s), ("decoding", first_s, request.end_s)]
    if request.status != "ok":
        spans = [("failed", request.due_s, request.end_s)]
    lines = "".join(
        f'<path class="{name}" d="M{x(begin):.1f},{level:.1f} H{max(x(end), x(begin) + 0.3):.1f}"/>'
        for name, begin, end in spans
        if end > begin
    )
    took = f"{digits(1000 * (request.end_s - request.due_s), 3)} ms"
    text = f"request {request.number}: {took}, {request.status}"
    return f'<g stroke-width="{thickness:.2f}">{lines}<title>{escape(text)}</title></g>'
