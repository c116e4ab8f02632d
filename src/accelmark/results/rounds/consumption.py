"""Figures from telemetry: utilisation, memory, power and energy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from accelmark.results.figures import FigureName
from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.timeline import Column, Floats
from accelmark.results.schema import Figure, Figures, ratio, value
from accelmark.telemetry.energy import MAX_GAP_S, EnergyReason, Series, energy

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


def max_gap_s(interval_s: float) -> float:
    """Return the longest gap between samples that is interpolated."""
    return max(GAP_INTERVALS * interval_s, MIN_GAP_S)


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
        grid = np.concatenate(([begin], times[(times > begin) & (times < end)], [end]))
        if gap := _gap(times, begin, end, gap_s):
            return Integral(None, None, gap)
        total += float(np.trapezoid(np.interp(grid, times, column), grid))
    return Integral(total, total / duration)


def _gap(points: Floats, begin: float, end: float, gap_s: float) -> str | None:
    """Describe a gap of more than ``gap_s`` between samples in the span, if there is one."""
    first = max(int(np.searchsorted(points, begin, side="right")) - 1, 0)
    last = min(int(np.searchsorted(points, end, side="left")), len(points) - 1)
    around = points[first : last + 1]
    if around[0] - begin > gap_s or end - around[-1] > gap_s:
        return "telemetry does not cover all of the measured time"
    gaps = np.diff(around)
    if len(gaps) and float(gaps.max()) > gap_s:
        at = float(around[int(gaps.argmax())]) - begin
        return f"telemetry has a gap of {float(gaps.max()):.1f} s, {max(at, 0.0):.1f} s after the start"
    return None


HostSamples = Mapping[str, tuple[Samples, Spans]]
"""Host -> its samples and the measured time on their clock."""

_WARNINGS: Final = {EnergyReason.COUNTER_DISAGREES, EnergyReason.COUNTER_WENT_BACK}
"""Reasons that are a warning next to a figure; all others make it null."""

_WHY: Final = {
    EnergyReason.NO_POWER: "power was not read",
    EnergyReason.EMPTY_WINDOW: "nothing was measured",
    EnergyReason.START_NOT_COVERED: "no power reading before the start",
    EnergyReason.END_NOT_COVERED: "no power reading after the end",
    EnergyReason.GAP_TOO_LONG: "the gap between power readings is too long",
    EnergyReason.COUNTER_DISAGREES: "integrated power and the energy counter differ by more than 5 %",
    EnergyReason.COUNTER_WENT_BACK: "the energy counter decreased; energy is integrated from power",
}

_NAMES: Final = (
    FigureName.PEAK_HOST_MEMORY, FigureName.DEVICE_UTILISATION, FigureName.CPU_UTILISATION, FigureName.MEAN_POWER,
    FigureName.ENERGY, FigureName.ENERGY_PER_UNIT, FigureName.UNITS_PER_JOULE, FigureName.TELEMETRY_CPU_TIME,
)  # fmt: skip


def consumption_figures(
    hosts: HostSamples, units: int, device_type: str, no_telemetry: str
) -> tuple[Figures, list[str]]:
    """Return the figures from telemetry, and warnings about them.

    Args:
        hosts: samples and measured spans; empty where there is no telemetry.
        units: units processed by all ranks.
        device_type: the framework's; for ``cpu`` the CPU packages are the devices, unless the vendor reads its own.
        no_telemetry: the reason of every figure where ``hosts`` is empty.
    """
    if not hosts:
        return {name: value(None, no_telemetry) for name in _NAMES}, []
    is_cpu = all(samples.measures_cpus(device_type) for samples, _ in hosts.values())
    figures: Figures = {
        FigureName.PEAK_HOST_MEMORY: _peak_host_memory(hosts),
        FigureName.CPU_UTILISATION: _mean_over(hosts, "cpu", _cpu),
        FigureName.DEVICE_UTILISATION: _mean_over(hosts, *(("cpu", _cpu) if is_cpu else ("utilisation", _devices))),
        FigureName.TELEMETRY_CPU_TIME: _telemetry_cpu_time(hosts),
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
        FigureName.ENERGY: Figure(value=measured, reason=reason or note),
        FigureName.MEAN_POWER: Figure(value=None if measured is None else power_w, reason=reason or note),
        FigureName.ENERGY_PER_UNIT: ratio(measured, units, per_unit_reason),
        FigureName.UNITS_PER_JOULE: ratio(units or None, measured, per_unit_reason),
    }
    return figures, warnings


def _on(host: str, hosts: HostSamples, reason: str) -> str:
    return reason if len(hosts) == 1 else f"{host}: {reason}"


def device_memory(hosts: HostSamples, device_type: str) -> tuple[float | None, str | None]:
    """Return the largest memory in MiB that a job used on a device, and a note where it includes other processes.

    The memory of the job's own processes where the driver reports it, else all memory in use on the device.
    """
    own, whole = [], []
    for samples, _ in hosts.values():
        for columns in () if samples.measures_cpus(device_type) else samples.devices.values():
            own += [used for used in columns.get("rank_memory_mib", ()) if used == used]
            whole += [used for used in columns.get("memory_used_mib", ()) if used == used]
    note = None if own or not whole else "of the whole device, memory of other processes included"
    return max(own or whole, default=None), note


def _peak_host_memory(hosts: HostSamples) -> Figure:
    used = [number for samples, _ in hosts.values() for number in samples.host.get("mem_used_mib", ())]
    return value(max((number for number in used if number == number), default=None), "telemetry has no host memory")


Columns = Sequence[tuple[Column, Column]]
"""(times, values) of each device."""


def _mean_over(hosts: HostSamples, name: str, columns_of: Callable[[Samples], Columns]) -> Figure:
    """Return the mean over devices of their time-weighted means of ``name``; null where a device has none."""
    means: list[float] = []
    for host, (samples, spans) in hosts.items():
        columns = columns_of(samples)
        if not columns:
            return value(None, _on(host, hosts, samples.reason("devices")))
        for times, column in columns:
            integral = _none(samples, name)
            if any(number == number for number in column):
                integral = integrate(times, column, spans, max_gap_s(samples.interval_s))
            if integral.mean is None:
                return value(None, _on(host, hosts, integral.reason))
            means.append(integral.mean)
    return Figure(value=sum(means) / len(means))


def _cpu(samples: Samples) -> Columns:
    return [(samples.t, samples.host.get("cpu", ()))]


def _devices(samples: Samples) -> Columns:
    return [(samples.times(columns), columns.get("utilisation", ())) for columns in samples.devices.values()]


def _energy(samples: Samples, spans: Spans, device_type: str, notes: list[str], alone: list[str]) -> Integral:
    """Return one host's energy: of its devices, or of its CPU packages where they are the devices.

    Appends to ``notes``, and to ``alone`` the sources that no other source can be compared with.
    """
    if samples.measures_cpus(device_type):
        packages = _series(samples.t, samples.host.get("rapl_j", ()))
        alone += ["the energy counter of CPU packages"] if packages else []
        return _energy_of(samples, spans, (), packages, "CPU packages", notes) if packages else _none(samples, "rapl_j")
    if not samples.devices:
        return _none(samples, "devices")
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
    """Return the energy of one device over the spans; null where a span is not covered."""
    gap_s = max(MAX_GAP_S, 3 * samples.interval_s)
    total = 0.0
    for part in (energy(power, begin, end, counter, max_gap_s=gap_s) for begin, end in spans):
        fatal = [reason for reason in part.reasons if reason not in _WARNINGS]
        if part.energy_j is None or fatal:
            why = ", ".join(_WHY[reason] for reason in fatal) or "samples do not cover it"
            return Integral(None, None, f"{what}: {why}")
        notes += (f"{what}: {_WHY[reason]}" for reason in part.reasons)
        total += part.energy_j
    duration_s = sum(end - begin for begin, end in spans)
    return Integral(total, total / duration_s if duration_s > 0 else None, "nothing was measured")


def _series(times: Sequence[float], column: Sequence[float]) -> Series:
    return [(t, number) for t, number in zip(times, column) if number == number]


def _none(samples: Samples, name: str) -> Integral:
    return Integral(None, None, samples.reason(name))


def _telemetry_cpu_time(hosts: HostSamples) -> Figure:
    total = 0.0
    for host, (samples, _) in hosts.items():
        known = [used for used in samples.cpu_times if used is not None]
        if not known or len(known) < len(samples.cpu_times):
            return value(None, _on(host, hosts, "the telemetry recorder was killed before it reported it"))
        total += sum(known)
    return Figure(value=total)
