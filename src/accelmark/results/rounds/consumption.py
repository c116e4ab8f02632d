"""Figures from telemetry: utilisation, memory, power and energy; and its series for charts, which give no figure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from accelmark.results.figures import FigureName as F
from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.timeline import Column, Floats, rounded, thin
from accelmark.results.schema import Figure, Figures, Quantity, TelemetrySeries, ratio, value
from accelmark.spec.backports import pairwise, zip_strict

GAP_INTERVALS: Final = 5.0
MIN_GAP_S: Final = 5.0
MIN_ENERGY_S: Final = 30.0
"""Shortest measured time of a published energy figure: power is read about once a second, steps are much shorter."""

Spans = Sequence[tuple[float, float]]
"""(begin, end) in seconds of the samples' clock."""


class Integral(NamedTuple):
    """An integral over time and its time-weighted mean, or the reason why there is none."""

    value: float | None
    mean: float | None
    reason: str = ""


def integrate(t: Column, values: Column, spans: Spans, gap_s: float) -> Integral:
    """Integrate by trapezoids over ``spans``, with the ends interpolated between neighbouring samples.

    An end without a sample beyond it takes the value of the nearest sample within ``gap_s``. NaN values are ignored.
    """
    times, column = np.asarray(t, dtype=np.float64), np.asarray(values, dtype=np.float64)
    kept = np.isfinite(column)
    times, column = times[kept], column[kept]
    duration = sum(end - begin for begin, end in spans)
    if not len(times):
        return Integral(None, None, "no sample has a value")
    if duration <= 0:
        return Integral(None, None, "nothing was measured")
    total = 0.0
    for begin, end in spans:
        first = max(int(np.searchsorted(times, begin, side="right")) - 1, 0)
        last = min(int(np.searchsorted(times, end, side="left")), len(times) - 1)
        around = times[first : last + 1]
        if around[0] - begin > gap_s or end - around[-1] > gap_s:
            return Integral(None, None, "telemetry does not cover all of the measured time")
        gaps = np.diff(around)
        if len(gaps) and float(gaps.max()) > gap_s:
            at = max(float(around[int(gaps.argmax())]) - begin, 0.0)
            return Integral(None, None, f"telemetry has a gap of {float(gaps.max()):.1f} s, {at:.1f} s after the start")
        grid = np.concatenate(([begin], times[(times > begin) & (times < end)], [end]))
        total += float(np.trapezoid(np.interp(grid, times, column), grid))
    return Integral(total, total / duration)


HostSamples = Mapping[str, tuple[Samples, Spans]]
"""Host -> its samples and the measured time on their clock."""

MAX_GAP_S: Final = 3.0
"""Longest interval between two readings over which power is interpolated."""
TOLERANCE: Final = 0.05
"""Allowed difference between integrated power and the counter, as a share of the counter."""

Series = Sequence[tuple[float, float]]
"""(monotonic s, value), sorted by time."""

COUNTER_DISAGREES: Final = "integrated power and the energy counter differ by more than 5 %"
COUNTER_WENT_BACK: Final = "the energy counter decreased; energy is integrated from power"
"""These two are warnings next to a figure; all other reasons make it null."""


def energy(
    power: Series, start_s: float, end_s: float, counter: Series = (), *, max_gap_s: float = MAX_GAP_S
) -> tuple[float | None, tuple[str, ...]]:
    """Return one device's energy over a window, from power in W and its energy counter in J over monotonic time.

    The counter is preferred, because instantaneous power sampled at 1 s aliases with shorter training steps. None where
    neither covers the window; the reasons why the energy is unknown or doubtful.
    """
    if end_s <= start_s:
        return None, ("nothing was measured",)
    integrated_j: float | None = None
    reasons = _not_covered(power, start_s, end_s)
    if power and not reasons:
        gaps = (t1 - t0 for (t0, _), (t1, _) in pairwise(power) if t1 > start_s and t0 < end_s)
        reasons = ("the gap between power readings is too long",) if max(gaps, default=0.0) > max_gap_s else ()
        inside = [(t, watts) for t, watts in power if start_s < t < end_s]
        curve = [(start_s, _at(power, start_s)), *inside, (end_s, _at(power, end_s))]
        integrated_j = sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(curve))
    went_back = any(after < before for (_, before), (_, after) in pairwise(counter))
    problems = (COUNTER_WENT_BACK,) if went_back else _not_covered(counter, start_s, end_s)
    if counter and not problems:  # gaps in the readings of a counter have no effect
        counter_j = _at(counter, end_s) - _at(counter, start_s)
        differs = integrated_j is not None and abs(integrated_j - counter_j) > TOLERANCE * counter_j
        return counter_j, (COUNTER_DISAGREES,) if differs and not reasons else ()
    if not power:
        return None, problems
    return integrated_j, (*reasons, *(problems if went_back else ()))


def _not_covered(points: Series, start_s: float, end_s: float) -> tuple[str, ...]:
    starts = ("no power reading before the start",) if points and points[0][0] > start_s else ()
    return (*starts, "no power reading after the end") if points and points[-1][0] < end_s else starts


def _at(points: Series, t: float) -> float:
    """Return the value at ``t``, which the points cover, linear between two of them."""
    right = bisect.bisect_left(points, (t,))
    if points[right][0] == t:
        return points[right][1]
    (t0, v0), (t1, v1) = points[right - 1], points[right]
    return v0 + (v1 - v0) * (t - t0) / (t1 - t0)


_NAMES: Final = (
    F.PEAK_HOST_MEMORY, F.DEVICE_UTILISATION, F.CPU_UTILISATION, F.MEAN_POWER,
    F.ENERGY, F.ENERGY_PER_UNIT, F.UNITS_PER_JOULE, F.TELEMETRY_CPU_TIME,
)  # fmt: skip


def consumption_figures(hosts: HostSamples, units: int, device_type: str, absent: str) -> tuple[Figures, list[str]]:
    """Return the figures from telemetry over the measured spans, and warnings about them.

    ``units`` are those that all ranks processed. For the ``device_type`` cpu the CPU packages are the devices, unless
    the vendor reads its own. ``absent`` is the reason of every figure where ``hosts`` is empty.
    """
    if not hosts:
        return {name: value(None, absent) for name in _NAMES}, []
    is_cpu = all(samples.measures_cpus(device_type) for samples, _ in hosts.values())
    memory = [mib for samples, _ in hosts.values() for mib in samples.host.get("mem_used_mib", ()) if mib == mib]
    cpu_times = {host: samples.cpu_times or [None] for host, (samples, _) in hosts.items()}
    killed = next((host for host, used in cpu_times.items() if None in used), None)
    figures: Figures = {
        F.PEAK_HOST_MEMORY: value(max(memory, default=None), "telemetry has no host memory"),
        F.CPU_UTILISATION: _mean_over(hosts, "cpu"),
        F.DEVICE_UTILISATION: _mean_over(hosts, "cpu" if is_cpu else "utilisation"),
        F.TELEMETRY_CPU_TIME: Figure(value=sum(sum(filter(None, used)) for used in cpu_times.values()))
        if killed is None
        else value(None, _on(killed, hosts, "the telemetry recorder was killed before it reported it")),
    }
    warnings: list[str] = []
    alone: list[str] = []
    energy_j, power_w, reason = 0.0, 0.0, ""
    for host, (samples, spans) in hosts.items():
        notes: list[str] = []
        used = _energy(samples, spans, device_type, notes, alone)
        warnings += (f"{host}: {what}" for what in notes)
        if used.value is None or used.mean is None:
            reason = _on(host, hosts, used.reason)
            break
        energy_j += used.value
        power_w += used.mean
    measured = None if reason else energy_j
    shortest_s = min(sum(end - begin for begin, end in spans) for _, spans in hosts.values())
    if measured is not None and shortest_s < MIN_ENERGY_S:
        warnings.append(f"energy was measured over {shortest_s:.1f} s; a published figure needs {MIN_ENERGY_S:g} s")
    per_unit_reason = reason or "nothing was measured"
    note = f"one source, nothing to compare it with: {alone[0]}" if alone else None
    figures |= {
        F.ENERGY: Figure(value=measured, reason=reason or note),
        F.MEAN_POWER: Figure(value=None if measured is None else power_w, reason=reason or note),
        F.ENERGY_PER_UNIT: ratio(measured, units, per_unit_reason),
        F.UNITS_PER_JOULE: ratio(units or None, measured, per_unit_reason),
    }
    return figures, warnings


def _on(host: str, hosts: HostSamples, reason: str) -> str:
    return reason if len(hosts) == 1 else f"{host}: {reason}"


def device_memory(hosts: HostSamples, device_type: str) -> tuple[float | None, str | None]:
    """Return the largest memory in MiB of the job's processes on a device, else of all, and a note on the latter."""
    measured = [samples for samples, _ in hosts.values() if not samples.measures_cpus(device_type)]
    own = [used for samples in measured for used in samples.readings("rank_memory_mib")]
    whole = [used for samples in measured for used in samples.readings("memory_used_mib")]
    note = None if own or not whole else "of the whole device, memory of other processes included"
    return max(own or whole, default=None), note


def _mean_over(hosts: HostSamples, name: str) -> Figure:
    means: list[float] = []
    for host, (samples, spans) in hosts.items():
        columns: list[tuple[Column, Column]] = [(samples.t, samples.host.get(name, ()))]
        if name != "cpu":
            columns = [(samples.times(device), device.get(name, ())) for device in samples.devices.values()]
        if not columns:
            return value(None, _on(host, hosts, samples.reason("devices")))
        for times, column in columns:
            integral = Integral(None, None, samples.reason(name))
            if any(number == number for number in column):
                integral = integrate(times, column, spans, max(GAP_INTERVALS * samples.interval_s, MIN_GAP_S))
            if integral.mean is None:
                return value(None, _on(host, hosts, integral.reason))
            means.append(integral.mean)
    return Figure(value=sum(means) / len(means))


def _energy(samples: Samples, spans: Spans, device_type: str, notes: list[str], alone: list[str]) -> Integral:
    if samples.measures_cpus(device_type):
        packages = _series(samples.t, samples.host.get("rapl_j", ()))
        alone += ["the energy counter of CPU packages"] if packages else []
        if not packages:
            return Integral(None, None, samples.reason("rapl_j"))
        return _energy_of(samples, spans, (), packages, "CPU packages", notes)
    if not samples.devices:
        return Integral(None, None, samples.reason("devices"))
    total = mean = 0.0
    for index, columns in samples.devices.items():
        if samples.infos.get(index, {}).get("power_in") in samples.devices:
            continue  # another device's reading includes its power
        power, counter = (_series(samples.times(columns), columns.get(name, ())) for name in ("power_w", "energy_j"))
        if not power and not counter:
            return Integral(None, None, f"device {index}: {samples.reason('power_w')}")
        alone += [f"power of device {index}"] if not counter else [f"energy of device {index}"] if not power else []
        if constant := samples.constant_power(index):
            return Integral(None, None, constant)
        used = _energy_of(samples, spans, power, counter, f"device {index}", notes)
        if used.value is None or used.mean is None:
            return used
        total, mean = total + used.value, mean + used.mean
    return Integral(total, mean)


def _energy_of(samples: Samples, spans: Spans, power: Series, counter: Series, what: str, notes: list[str]) -> Integral:
    gap_s = max(MAX_GAP_S, 3 * samples.interval_s)
    total = 0.0
    for energy_j, reasons in (energy(power, begin, end, counter, max_gap_s=gap_s) for begin, end in spans):
        fatal = [reason for reason in reasons if reason not in (COUNTER_DISAGREES, COUNTER_WENT_BACK)]
        if energy_j is None or fatal:
            return Integral(None, None, f"{what}: {', '.join(fatal) or 'samples do not cover it'}")
        notes += (f"{what}: {reason}" for reason in reasons)
        total += energy_j
    return Integral(total, total / sum(end - begin for begin, end in spans))


def _series(times: Sequence[float], column: Sequence[float]) -> Series:
    return [(t, number) for t, number in zip(times, column) if number == number]


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
            packages.append(_line(f"{host} CPU packages", read_s[1:], np.diff(counter) / np.diff(read_s), spans))
    series = [one for (quantity, unit), found in lines.items() for one in _lines_of(quantity, unit, found, span_s)]
    if not any(one.quantity == "power" for one in series):
        series += _lines_of("power", "W", packages, span_s)
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


def _lines_of(
    quantity: Quantity, unit: str, lines: list[_Line], span_s: tuple[float, float] | None
) -> Iterator[TelemetrySeries]:
    if span_s is not None:
        inside = [(line, (line.times >= 0) & (line.times <= span_s[1] - span_s[0])) for line in lines]
        lines = [_Line(line.label, line.times[kept], line.values[kept]) for line, kept in inside]
    lines = [line for line in lines if np.isfinite(line.values).any()]
    for line in _joined(lines) if len(lines) > MAX_LINES else lines:
        kept = thin(line.values, _MAX_TELEMETRY_POINTS)
        points = zip_strict(line.times[kept].tolist(), line.values[kept].tolist())
        drawn = tuple((round(time, 3), rounded(value, 5)) for time, value in points)
        yield TelemetrySeries(quantity=quantity, unit=unit, label=line.label, points=drawn)


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
