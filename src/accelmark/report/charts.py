"""Charts as SVG, styled by the page's style sheet: no script and no inline style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Final, NamedTuple

from markupsafe import Markup

from accelmark.results.scaling import ScalingCurve
from accelmark.spec.log.records import CollectiveTiming
from accelmark.spec.number_format import digits, percent, quantity, scale_of

WIDE: Final = 960
HALF: Final = 470
"""Width of one of two charts in a row, and of a chart on a narrow screen."""
_HEIGHT: Final = 300
_LEFT: Final = 78
_RIGHT: Final = 24
_TOP: Final = 26
_BOTTOM: Final = 46
_SHARES: Final = ((0.0, "0 %"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"))
_MAX_SHARE: Final = 0.9995
COLOURS: Final = 6
"""Line colours of the style sheet."""
DASHES: Final = ("none", "7 4", "2 3", "9 3 2 3")
_DIGIT: Final = 7.6
"""Width of a digit of a label on a narrow screen."""
_SIZE_WIDTH: Final = 62
"""Least distance between the labels of two sizes (``256 KiB``)."""
_MIN_RUNS: Final = 4
"""Number of runs from which levels are drawn: change points need two runs on each side."""


def fitted(draw: Callable[[int], Markup]) -> Markup:
    """Draw a chart for wide and for narrow screens; the style sheet shows the one that fits."""
    return Markup('<div class="on-wide">{}</div><div class="on-narrow">{}</div>').format(draw(WIDE), draw(HALF))


def scaling_chart(curve: ScalingCurve) -> Markup:
    """Draw scaling efficiency over ranks (logarithmic) with the ideal line and 95 % intervals."""
    return fitted(partial(_scaling, curve))


def _scaling(curve: ScalingCurve, width: int) -> Markup:
    ranks = [point.ranks for point in curve.points]
    highest = max(1.0, *(point.efficiency + (point.half95 or 0) for point in curve.points))
    top = math.ceil(highest * 5 + 0.01) / 5
    low, high = math.log2(min(ranks)), math.log2(max(ranks))

    def x(count: int) -> float:
        return _LEFT + 30 + (width - _LEFT - _RIGHT - 60) * ((math.log2(count) - low) / (high - low or 1))

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)

    parts = [grid_line(y(step * 0.2), percent(step * 0.2), width) for step in range(int(top * 5 + 1.5))]
    parts.append(f'<path class="ideal" d="M{_LEFT},{y(1):.1f} H{width - _RIGHT}"/>')
    parts.append(_path([(x(point.ranks), y(point.efficiency)) for point in curve.points]))
    for point in curve.points:
        at, level = x(point.ranks), y(point.efficiency)
        if point.half95:
            top_y, low_y = y(point.efficiency + point.half95), y(max(0.0, point.efficiency - point.half95))
            parts.append(f'<path class="whisker" d="M{at:.1f},{top_y:.1f} V{low_y:.1f}"/>')
        text = f"{point.scale}: {percent(point.efficiency, 3)}, {digits(point.throughput)} {curve.unit}s/s"
        parts.append(_point(at, level, text))
        parts.append(text_at(at, level - 12, percent(point.efficiency, 3), "middle", "strong-text"))
        parts.append(text_at(at, _HEIGHT - 24, point.scale, "middle"))
    parts.append(text_at((_LEFT + width - _RIGHT) / 2, _HEIGHT - 6, "hosts × devices per host", "middle"))
    return drawing(
        parts, f"Scaling efficiency of {curve.model} on {curve.chip}; values in the table below", width=width
    )


def trend_chart(
    points: Sequence[tuple[str, float, float | None]], segments: Sequence[tuple[int, int, float]], unit: str, title: str
) -> Markup:
    """Draw a figure over runs, given as (label, value, half interval), and the level of each segment."""
    return fitted(partial(_trend, points, segments, unit, title))


def _trend(
    points: Sequence[tuple[str, float, float | None]],
    segments: Sequence[tuple[int, int, float]],
    unit: str,
    title: str,
    width: int,
) -> Markup:
    values = [value for _, value, _ in points]
    low = min(value - (half or 0) for _, value, half in points)
    high = max(value + (half or 0) for _, value, half in points)
    margin = 0.15 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    count = len(points)

    def x(position: float) -> float:
        return _LEFT + 24 + (width - _LEFT - _RIGHT - 48) * (position / max(count - 1, 1) if count > 1 else 0.5)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    steps = ticks(low, high)
    scale = scale_of(max(map(abs, values)), unit)
    decimals = max(0, -math.floor(math.log10((steps[1] - steps[0]) / scale.divisor) + 1e-9)) if len(steps) > 1 else 3
    parts = [grid_line(y(tick), f"{tick / scale.divisor:,.{decimals}f}".replace("-", "−"), width) for tick in steps]
    parts.append(text_at(_LEFT, _TOP - 6, f"{title}, {scale.unit}" if scale.unit else title, "start", "strong-text"))
    parts.append(_path([(x(i), y(value)) for i, value in enumerate(values)]))
    for begin, end, level in segments if count >= _MIN_RUNS else ():
        left, right = x(begin) - 10, x(end - 1) + 10
        parts.append(f'<path class="level" d="M{left:.1f},{y(level):.1f} H{right:.1f}"/>')
        if begin:
            middle = (x(begin - 1) + x(begin)) / 2
            parts.append(f'<path class="change" d="M{middle:.1f},{_TOP} V{_HEIGHT - _BOTTOM}"/>')
    for i, (label, value, half) in enumerate(points):
        if half:
            parts.append(f'<path class="whisker" d="M{x(i):.1f},{y(value + half):.1f} V{y(value - half):.1f}"/>')
        parts.append(_point(x(i), y(value), f"{label}: {quantity(value, unit)}"))
    shown = range(0, count, max(1, math.ceil(count * 130 / width)))
    days = [points[i][0][:10] for i in shown]
    several = len(set(days)) < len(days)
    for i, day in zip(shown, days, strict=True):
        label = f"{day} {points[i][0][11:16]}".strip() if several else day
        parts.append(text_at(min(x(i), width - _DIGIT * len(label) / 2), _HEIGHT - 24, label, "middle"))
    return drawing(parts, f"{title} over time; values in the table below", width=width)


Keys = tuple[tuple[str, int, str], ...]
"""(label, colour number, dashes) of each curve."""


class KeyedChart(NamedTuple):
    """Curves as SVG, and the key of each."""

    svg: Markup
    keys: Keys


def keys_of(labels: Sequence[str]) -> Keys:
    """Return the key of each curve."""
    return tuple((label, i % COLOURS + 1, DASHES[i // COLOURS % len(DASHES)]) for i, label in enumerate(labels))


def latency_chart(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], samples: str = "batches", width: int | None = None
) -> KeyedChart | None:
    """Draw labelled curves of (share of the samples, latency in ms): shares in nines (x), logarithmic latency (y).

    Returns None where no latency is above zero. Without ``width`` the chart fits the screen.
    """
    curves = [(label, curve) for label, curve in curves if len(curve) > 1]
    values = [latency for _, curve in curves for _, latency in curve if latency > 0]
    if not values:
        return None
    keys = keys_of([label for label, _ in curves])
    draw = partial(_latencies, curves, keys, (min(values) / 1.1, max(values) * 1.1), samples)
    return KeyedChart(fitted(draw) if width is None else draw(width), keys)


def _latencies(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    keys: Keys,
    bounds: tuple[float, float],
    samples: str,
    width: int,
) -> Markup:
    low, high = bounds

    def x(share: float) -> float:
        nines = -math.log10(1 - min(share, _MAX_SHARE)) / -math.log10(1 - _MAX_SHARE)
        return _LEFT + nines * (width - _LEFT - _RIGHT)

    def y(latency_ms: float) -> float:
        rise = math.log(max(latency_ms, low) / low) / math.log(high / low)
        return _TOP + (1 - rise) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [grid_line(y(value), f"{value:,g} ms", width) for value in logarithmic_ticks(low, high)]
    for share, label in _SHARES:
        parts.append(f'<path class="grid" d="M{x(share):.1f},{_TOP} V{_HEIGHT - _BOTTOM}"/>')
        parts.append(text_at(x(share), _HEIGHT - 24, label, "middle"))
    for (label, colour, dashes), (_, curve) in zip(keys, curves, strict=True):
        points = " ".join(f"{x(share):.1f},{y(latency):.1f}" for share, latency in curve)
        title = f"<title>{escape(label)}</title>"
        parts.append(f'<polyline class="c{colour}" stroke-dasharray="{dashes}" points="{points}">{title}</polyline>')
    label = f"Latency in milliseconds over the share of {samples}; percentiles in the table above"
    return drawing(parts, label, "chart latency", width)


def collectives_chart(sweep: Sequence[CollectiveTiming]) -> KeyedChart | None:
    """Draw the bus bandwidth of each collective over the size of its buffer, both logarithmic; None without timings."""
    names = list(dict.fromkeys(one.operation for one in sweep))
    if not names:
        return None
    keys = keys_of([title_of(name) for name in names])
    return KeyedChart(fitted(partial(_collectives, sweep, names, keys)), keys)


def _collectives(sweep: Sequence[CollectiveTiming], names: Sequence[str], keys: Keys, width: int) -> Markup:
    sizes, rates = [one.size_bytes for one in sweep], [one.bus_gb_s for one in sweep]
    low, high = min(rates) / 1.2, max(rates) * 1.2
    first, last = math.log2(min(sizes)), math.log2(max(sizes))

    def x(size: int) -> float:
        return _LEFT + 24 + (width - _LEFT - _RIGHT - 48) * (math.log2(size) - first) / (last - first or 1)

    def y(rate: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - math.log(rate / low) / math.log(high / low))

    marks = [value for value in logarithmic_ticks(low, high) if f"{value:e}".startswith(("1", "3"))]
    parts = [grid_line(y(value), quantity(value, "GB/s", 1), width) for value in marks or logarithmic_ticks(low, high)]
    shown: list[int] = []
    for size in sorted(set(sizes)):
        if not shown or x(size) - x(shown[-1]) >= _SIZE_WIDTH:
            shown.append(size)
    parts += [text_at(x(size), _HEIGHT - 24, size_text(size), "middle") for size in shown]
    for (label, colour, dashes), name in zip(keys, names, strict=True):
        points = " ".join(f"{x(one.size_bytes):.1f},{y(one.bus_gb_s):.1f}" for one in sweep if one.operation == name)
        title = f"<title>{escape(label)}</title>"
        parts.append(f'<polyline class="c{colour}" stroke-dasharray="{dashes}" points="{points}">{title}</polyline>')
    return drawing(parts, "Bus bandwidth over size; values in the table below", "chart latency", width)


def title_of(collective: str) -> str:
    """Return the usual name of a collective: ``all-reduce``."""
    return collective.replace("_", "-")


def size_text(num_bytes: int) -> str:
    """Return the size of a buffer in the largest binary unit: ``256 KiB``."""
    exponent = min(3, (max(num_bytes, 1).bit_length() - 1) // 10)
    return f"{num_bytes / 2 ** (10 * exponent):.4g} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each decade between two bounds, or equal steps where that gives fewer than two."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [mantissa * 10.0**exponent for exponent in exponents for mantissa in (1, 2, 5)]
    found = [value for value in decades if low <= value <= high]
    return found if len(found) > 1 else ticks(low, high)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values between two bounds."""
    rough = (high - low) / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), power * 10)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def grid_line(y: float, label: str, width: int = WIDE) -> str:
    """Draw a horizontal line with its value."""
    return f'<path class="grid" d="M{_LEFT},{y:.1f} H{width - _RIGHT}"/>' + text_at(_LEFT - 8, y + 4, label, "end")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="line" d="M{" L".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _point(x: float, y: float, tooltip: str) -> str:
    return f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tooltip)}</title></circle>'


def text_at(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    """Draw text; ``anchor`` is start, middle or end."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def drawing(
    parts: Sequence[str], label: str, css_class: str = "chart", width: int = WIDE, height: int = _HEIGHT
) -> Markup:
    """Return the parts as an SVG with a description."""
    head = f'<svg class="{css_class}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")  # noqa: S704 - all texts in it are escaped
