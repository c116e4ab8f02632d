"""Downsampled curves for charts; figures are never computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from accelmark.results.rounds.consumption import HostSamples, Spans
from accelmark.results.rounds.timeline import Column, Floats, Indices, Timeline
from accelmark.results.schema import Point, Quantity, TelemetrySeries
from accelmark.spec.backports import zip_strict

MAX_POINTS: Final = 1000
HISTOGRAM_BINS: Final = 60


def thin(values: Floats, limit: int = MAX_POINTS) -> Indices:
    """Return increasing indices of at most ``limit`` points, with the minimum and maximum of each interval."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    intervals = max((limit - 2) // 2, 1)
    edges = np.linspace(1, count - 1, intervals + 1).astype(np.int64)
    low, high = edges[:-1], edges[1:]
    kept = [0, count - 1]
    lowest = np.where(np.isfinite(values), values, np.inf)
    highest = np.where(np.isfinite(values), values, -np.inf)
    for begin, end in zip_strict(low.tolist(), high.tolist()):
        if end > begin:
            kept.append(begin + int(lowest[begin:end].argmin()))
            kept.append(begin + int(highest[begin:end].argmax()))
    return np.unique(np.asarray(kept))


def curves_of(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> dict[str, tuple[Point, ...]]:
    """Return the curves ``loss``, ``throughput`` (units/s of each window) and each metric, over steps and time."""
    curves: dict[str, tuple[Point, ...]] = {}
    ends, times = timeline.windows["steps"], timeline.windows["time_s"]
    steps = np.arange(1, len(timeline.losses) + 1)
    if len(steps) and len(ends):
        loss_times = np.interp(steps, np.append(0.0, ends), np.append(0.0, times))
        curves["loss"] = _points(steps, loss_times, timeline.losses)
    if len(ends):
        trained, wall_s = np.diff(timeline.windows["samples"], prepend=0.0), timeline.windows["wall_s"]
        by_steps = timeline.windows["lengths"] * samples_per_step  # for the first window after a restart
        units = np.where((trained <= 0) | (trained > by_steps), by_steps, trained) * units_per_sample
        with np.errstate(divide="ignore", invalid="ignore"):
            curves["throughput"] = _points(ends, times, np.where(wall_s > 0, units / wall_s, np.nan))
    for timed in timeline.evaluations:
        for name, value in timed.evaluation.metrics.items():
            point = Point(step=timed.evaluation.global_steps, time_s=round(timed.time_s, 4), value=value)
            curves[name] = (*curves.get(name, ()), point)
    return curves


def _points(steps: Floats | Indices, times: Floats, values: Floats) -> tuple[Point, ...]:
    kept = thin(values)
    return tuple(
        Point(step=int(step), time_s=round(time, 4), value=_rounded(value))
        for step, time, value in zip_strict(steps[kept], times[kept].tolist(), values[kept].tolist())
    )


def _rounded(value: float, digits: int = 7) -> float | None:
    return float(f"{value:.{digits}g}") if value - value == 0 else None


def histogram(step_ms: Floats) -> tuple[tuple[float, int], ...]:
    """Return (upper edge in ms, number of steps) of bins of equal width up to p99.5, and one bin to the slowest step.

    The first entry has the lower edge of the first bin and 0 steps. The number of bins follows Rice's rule.
    """
    if not len(step_ms):
        return ()
    low, high, slowest = float(step_ms.min()), float(np.quantile(step_ms, 0.995)), float(step_ms.max())
    if high <= low:
        return ((low, 0), (slowest, len(step_ms)))
    edges = np.linspace(low, high, min(HISTOGRAM_BINS, max(8, round(2 * len(step_ms) ** (1 / 3)))) + 1)
    if slowest > high:
        edges = np.append(edges, slowest)
    counts, _ = np.histogram(step_ms, bins=edges.astype(np.float64))
    counts[-1] += len(step_ms) - int(counts.sum())
    return ((round(low, 4), 0), *((round(float(edge), 4), int(n)) for edge, n in zip_strict(edges[1:], counts)))


MAX_LINES: Final = 8
"""Largest number of devices or hosts with a line each; more are drawn as mean, minimum and maximum."""
_MAX_TELEMETRY_POINTS: Final = 600
_GRID: Final = 600

_DEVICE: Final[dict[str, tuple[Quantity, str]]] = {
    "utilisation": ("utilisation", "ratio"), "memory_used_mib": ("memory", "MiB"), "power_w": ("power", "W"),
    "temperature_c": ("temperature", "°C"), "sm_clock_mhz": ("clock", "MHz"),
}  # fmt: skip
_HOST: Final[dict[str, tuple[Quantity, str]]] = {
    "cpu": ("cpu", "ratio"), "rank_rss_mib": ("rank_memory", "MiB"), "mem_used_mib": ("host_memory", "MiB"),
}  # fmt: skip


class _Line(NamedTuple):
    label: str
    times: Floats
    values: Floats


def telemetry_series(hosts: HostSamples, span_s: tuple[float, float] | None = None) -> tuple[TelemetrySeries, ...]:
    """Return telemetry of each host and device as series over raw training time in seconds.

    What was sampled between two attempts has no place on this axis and is left out. With ``span_s`` (monotonic time of
    the host of a load) the series have what was sampled in it, from its beginning.
    """
    if span_s is not None:
        hosts = {host: (samples, (span_s,)) for host, (samples, _) in hosts.items()}
    lines: dict[tuple[Quantity, str], list[_Line]] = {named: [] for named in (*_DEVICE.values(), *_HOST.values())}
    packages = []
    for host, (samples, spans) in hosts.items():
        for column, named in _DEVICE.items():
            for index, columns in samples.devices.items():
                label = f"device {index}" if len(hosts) == 1 else f"{host} device {index}"
                if column in columns and (times := samples.times(columns)):
                    lines[named].append(_line(label, times, columns[column], spans))
        for column, named in _HOST.items():
            if column in samples.host:
                lines[named].append(_line(host, samples.t, samples.host[column], spans))
        counter = np.asarray(samples.host.get("rapl_j", ()), dtype=np.float64)
        if len(counter) > 1:
            read_s = np.asarray(samples.t, dtype=np.float64)
            power_w = np.diff(counter) / np.diff(read_s)
            packages.append(_line(f"{host} CPU packages", read_s[1:], power_w, spans))
    series = [one for (quantity, unit), found in lines.items() for one in _series(quantity, unit, found, span_s)]
    if not any(one.quantity == "power" for one in series):
        series += _series("power", "W", packages, span_s)
    return tuple(series)


def _line(label: str, times: Column, values: Column, spans: Spans) -> _Line:
    """Return samples over the time in ``spans``; times before the first are negative, those after the last continue."""
    t, measured = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    clock_began = max((at for at in range(1, len(spans)) if spans[at][0] < spans[at - 1][1]), default=0)
    first = next((at for at in range(clock_began, len(spans)) if not len(t) or spans[at][1] >= t[0]), len(spans) - 1)
    placed, before_s = np.full(len(t), np.nan), sum(end - begin for begin, end in spans[:first])
    for at, (begin, end) in enumerate(spans[first:], first):
        low, high = begin if at > first else -np.inf, end if at < len(spans) - 1 else np.inf
        inside = (t >= low) & (t <= high)
        placed[inside] = t[inside] - begin + before_s
        before_s += end - begin
    kept = np.isfinite(placed)
    return _Line(label, placed[kept], measured[kept])


def _series(
    quantity: Quantity, unit: str, lines: list[_Line], span_s: tuple[float, float] | None
) -> Iterator[TelemetrySeries]:
    if span_s is not None:
        length_s = span_s[1] - span_s[0]
        inside = [(line, (line.times >= 0) & (line.times <= length_s)) for line in lines]
        lines = [_Line(line.label, line.times[kept], line.values[kept]) for line, kept in inside]
    lines = [line for line in lines if np.isfinite(line.values).any()]
    for line in _joined(lines) if len(lines) > MAX_LINES else lines:
        kept = thin(line.values, _MAX_TELEMETRY_POINTS)
        points = zip_strict(line.times[kept].tolist(), line.values[kept].tolist())
        yield TelemetrySeries(
            quantity=quantity,
            unit=unit,
            label=line.label,
            points=tuple((round(time, 3), _rounded(value, 5)) for time, value in points),
        )


def _joined(lines: list[_Line]) -> list[_Line]:
    begin, end = min(line.times[0] for line in lines), max(line.times[-1] for line in lines)
    grid = np.linspace(begin, end, min(_GRID, max(len(line.times) for line in lines)))
    rows = []
    for line in lines:
        kept = np.isfinite(line.values)
        rows.append(np.interp(grid, line.times[kept], line.values[kept], left=np.nan, right=np.nan))
    table = np.vstack(rows)
    covered = np.isfinite(table).any(axis=0)
    table, grid = table[:, covered], grid[covered]
    return [
        _Line(f"mean of {len(lines)} lines", grid, np.nanmean(table, axis=0)),
        _Line("minimum", grid, np.nanmin(table, axis=0)),
        _Line("maximum", grid, np.nanmax(table, axis=0)),
    ]
