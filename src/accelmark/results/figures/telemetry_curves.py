"""Telemetry for the eye: a few columns over training time, joined over devices where there are many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from accelmark.results.figures.consumption import HostSamples
from accelmark.results.figures.curves import thin
from accelmark.results.schema import TelemetrySeries

if TYPE_CHECKING:
    from accelmark.results.figures.arrays import Column, Floats

MOST_LINES: Final = 8
"""Devices (or hosts) drawn one by one; more are drawn as their mean, least and greatest."""
_MOST_POINTS: Final = 600
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
    """Return what telemetry saw of each host and device, as series over seconds since TRAIN_START."""
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
    """Power of the CPU packages between two readings of their energy counter."""
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
    if len(lines) > MOST_LINES:
        lines = _joined(lines)
    return [
        TelemetrySeries(quantity=shown.quantity, unit=shown.unit, label=line.label, points=_points(line))
        for line in lines
    ]


def _joined(lines: list[_Line]) -> list[_Line]:
    """Lay many lines on one grid and return their mean, least and greatest."""
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
        _Line("least", grid, np.nanmin(table, axis=0)),
        _Line("greatest", grid, np.nanmax(table, axis=0)),
    ]


def _points(line: _Line) -> tuple[tuple[float, float | None], ...]:
    import numpy as np

    values = line.values
    kept = thin(values, _MOST_POINTS)
    return tuple(
        (round(float(line.times[i]), 3), float(f"{values[i]:.5g}") if np.isfinite(values[i]) else None) for i in kept
    )
