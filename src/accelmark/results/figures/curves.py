"""Downsampled curves for charts; figures are never computed from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from accelmark.results.figures.consumption import HostSamples
from accelmark.results.schema import Point, TelemetrySeries

if TYPE_CHECKING:
    from accelmark.results.figures.timeline import Column, Floats, Indices, Timeline

MAX_POINTS: Final = 1000
HISTOGRAM_BINS: Final = 60


def thin(values: Floats, limit: int = MAX_POINTS) -> Indices:
    """Return increasing indices of at most ``limit`` points, with the minimum and maximum of each interval.

    Non-finite values are kept only where a whole interval is non-finite: as one gap.
    """
    import numpy as np

    count = len(values)
    if count <= limit:
        return np.arange(count)
    intervals = max((limit - 2) // 2, 1)
    edges = np.linspace(1, count - 1, intervals + 1).astype(np.int64)
    low, high = edges[:-1], edges[1:]
    kept = [0, count - 1]
    lowest = np.where(np.isfinite(values), values, np.inf)
    highest = np.where(np.isfinite(values), values, -np.inf)
    for begin, end in zip(low.tolist(), high.tolist(), strict=True):
        if end > begin:
            kept.append(begin + int(lowest[begin:end].argmin()))
            kept.append(begin + int(highest[begin:end].argmax()))
    return np.unique(np.asarray(kept))


def curves_of(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> dict[str, tuple[Point, ...]]:
    """Return the curves ``loss``, ``throughput`` (units/s of each window) and each metric, over steps and time."""
    import numpy as np

    curves: dict[str, tuple[Point, ...]] = {}
    steps = np.arange(1, len(timeline.losses) + 1)
    if len(steps) and len(timeline.window_steps):
        times = np.interp(
            steps, np.concatenate(([0.0], timeline.window_steps)), np.concatenate(([0.0], timeline.window_time_s))
        )
        curves["loss"] = _points(steps, times, timeline.losses)
    if len(timeline.window_steps):
        rate = window_throughput(timeline, units_per_sample, samples_per_step)
        curves["throughput"] = _points(timeline.window_steps, timeline.window_time_s, rate)
    for timed in timeline.evaluations:
        for name, value in timed.evaluation.metrics.items():
            point = Point(step=timed.evaluation.global_steps, time_s=round(timed.time_s, 4), value=value)
            curves[name] = (*curves.get(name, ()), point)
    return curves


def window_throughput(timeline: Timeline, units_per_sample: int, samples_per_step: int) -> Floats:
    """Return units per second of each window; the first window after a restart is computed from its steps."""
    import numpy as np

    trained = np.diff(timeline.window_samples, prepend=0.0)
    by_steps = timeline.window_lengths * samples_per_step
    restarted = (trained <= 0) | (trained > by_steps)
    units = np.where(restarted, by_steps, trained) * units_per_sample
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(timeline.window_wall_s > 0, units / timeline.window_wall_s, np.nan)


def _points(steps: Floats | Indices, times: Floats, values: Floats) -> tuple[Point, ...]:
    kept = thin(values)
    return tuple(
        Point(step=int(step), time_s=round(float(time), 4), value=_rounded(float(value)))
        for step, time, value in zip(steps[kept], times[kept], values[kept], strict=True)
    )


def _rounded(value: float, digits: int = 7) -> float | None:
    """Return ``value`` with enough digits for a chart, None where it is not finite."""
    return float(f"{value:.{digits}g}") if value - value == 0 else None


def histogram(step_ms: Floats, bins: int = HISTOGRAM_BINS) -> tuple[tuple[float, int], ...]:
    """Return (upper edge in ms, number of steps) of bins of equal width up to p99.5, and one bin to the slowest step.

    The first entry has the lower edge of the first bin and 0 steps. The number of bins follows Rice's rule, at most
    ``bins``.
    """
    import numpy as np

    if not len(step_ms):
        return ()
    low, high, slowest = float(step_ms.min()), float(np.quantile(step_ms, 0.995)), float(step_ms.max())
    if high <= low:
        return ((low, 0), (slowest, len(step_ms)))
    edges = np.linspace(low, high, min(bins, max(8, round(2 * len(step_ms) ** (1 / 3)))) + 1)
    if slowest > high:
        edges = np.append(edges, slowest)
    counts, _ = np.histogram(step_ms, bins=edges.astype(np.float64))
    rest = len(step_ms) - int(counts.sum())
    counts[-1] += rest
    return ((round(low, 4), 0), *((round(float(edge), 4), int(n)) for edge, n in zip(edges[1:], counts, strict=True)))


MAX_LINES: Final = 8
"""Largest number of devices or hosts with a line each; more are drawn as mean, minimum and maximum."""
_MAX_TELEMETRY_POINTS: Final = 600
_GRID: Final = 600

Quantity = Literal["utilisation", "memory", "power", "temperature", "clock", "cpu", "host_memory"]


class _Shown(NamedTuple):
    column: str
    quantity: Quantity
    unit: str


class _Line(NamedTuple):
    label: str
    times: Floats
    values: Floats


_DEVICE: Final = (
    _Shown("utilisation", "utilisation", "ratio"),
    _Shown("memory_used_mib", "memory", "MiB"),
    _Shown("power_w", "power", "W"),
    _Shown("temperature_c", "temperature", "°C"),
    _Shown("sm_clock_mhz", "clock", "MHz"),
)
_HOST: Final = (
    _Shown("cpu", "cpu", "ratio"),
    _Shown("mem_used_mib", "host_memory", "MiB"),
)


def telemetry_series(hosts: HostSamples) -> tuple[TelemetrySeries, ...]:
    """Return telemetry of each host and device as series over seconds since TRAIN_START."""
    found: list[TelemetrySeries] = []
    for shown in _DEVICE:
        found += _series(shown, list(_device_lines(hosts, shown.column)))
    for shown in _HOST:
        found += _series(shown, list(_host_lines(hosts, shown.column)))
    if not any(series.quantity == "power" for series in found):
        found += _series(_Shown("rapl_j", "power", "W"), list(_package_lines(hosts)))
    return tuple(found)


def _device_lines(hosts: HostSamples, column: str) -> Iterable[_Line]:
    for host, (samples, spans) in hosts.items():
        for index, columns in samples.devices.items():
            if column in columns:
                label = f"device {index}" if len(hosts) == 1 else f"{host} device {index}"
                yield _line(label, samples.times(columns), columns[column], spans[0][0])


def _host_lines(hosts: HostSamples, column: str) -> Iterable[_Line]:
    for host, (samples, spans) in hosts.items():
        if column in samples.host:
            yield _line(host, samples.t, samples.host[column], spans[0][0])


def _package_lines(hosts: HostSamples) -> Iterable[_Line]:
    """Yield the power of the CPU packages, from differences of their energy counter."""
    import numpy as np

    for host, (samples, spans) in hosts.items():
        counter = np.asarray(samples.host.get("rapl_j", ()), dtype=np.float64)
        if len(counter) < 2 or not np.isfinite(counter).any():
            continue
        times = np.asarray(samples.t, dtype=np.float64)
        power = np.diff(counter) / np.diff(times)
        yield _line(f"{host} CPU packages", times[1:], power, spans[0][0])


def _line(label: str, times: Column, values: Column, zero_s: float) -> _Line:
    import numpy as np

    at, column = np.asarray(times, dtype=np.float64) - zero_s, np.asarray(values, dtype=np.float64)
    return _Line(label, at, column)


def _series(shown: _Shown, lines: list[_Line]) -> list[TelemetrySeries]:
    import numpy as np

    lines = [line for line in lines if len(line.values) and np.isfinite(line.values).any()]
    if len(lines) > MAX_LINES:
        lines = _joined(lines)
    return [
        TelemetrySeries(quantity=shown.quantity, unit=shown.unit, label=line.label, points=_samples(line))
        for line in lines
    ]


def _joined(lines: list[_Line]) -> list[_Line]:
    """Interpolate lines on one grid and return their mean, minimum and maximum."""
    import numpy as np

    begin, end = min(line.times[0] for line in lines), max(line.times[-1] for line in lines)
    grid = np.linspace(begin, end, min(_GRID, max(len(line.times) for line in lines)))
    rows = []
    for line in lines:
        kept = np.isfinite(line.values)
        times, values = line.times[kept], line.values[kept]
        rows.append(np.interp(grid, times, values, left=np.nan, right=np.nan))
    table = np.vstack(rows)
    covered = np.isfinite(table).any(axis=0)
    table, grid = table[:, covered], grid[covered]
    many = f"{len(lines)} lines"
    return [
        _Line(f"mean of {many}", grid, np.nanmean(table, axis=0)),
        _Line("minimum", grid, np.nanmin(table, axis=0)),
        _Line("maximum", grid, np.nanmax(table, axis=0)),
    ]


def _samples(line: _Line) -> tuple[tuple[float, float | None], ...]:
    kept = thin(line.values, _MAX_TELEMETRY_POINTS)
    return tuple(
        (round(float(time), 3), _rounded(float(value), 5))
        for time, value in zip(line.times[kept], line.values[kept], strict=True)
    )
