"""Figures from telemetry: utilisation, memory, power and energy while training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from accelmark.results.figures import FigureName
from accelmark.results.integrate import Integral, Spans, counted, integrate, largest_gap_s
from accelmark.results.measure import Figures, ratio, value
from accelmark.results.samples import Samples
from accelmark.results.schema import Figure

HostSamples = Mapping[str, tuple[Samples, Spans]]
"""Host -> its samples, and when it trained on their clock."""

COUNTER_TOLERANCE: Final = 0.1
"""How far a device's own energy counter may be from the trapezoids before it is told."""

_NAMES: Final = (
    FigureName.PEAK_HOST_MEMORY, FigureName.DEVICE_UTILISATION, FigureName.CPU_UTILISATION, FigureName.MEAN_POWER,
    FigureName.ENERGY, FigureName.ENERGY_PER_UNIT, FigureName.UNITS_PER_JOULE, FigureName.TELEMETRY_CPU_TIME,
)  # fmt: skip


def consumption_figures(hosts: HostSamples, units: int, device_type: str, why_none: str) -> tuple[Figures, list[str]]:
    """Return the figures that telemetry gives, and warnings about it.

    Args:
        hosts: samples and training spans; empty where there is no telemetry.
        units: units trained over all ranks.
        device_type: the framework's; for ``cpu`` the CPU packages are the devices.
        why_none: the reason of every figure when ``hosts`` is empty.
    """
    if not hosts:
        return {name: Figure(value=None, reason=why_none) for name in _NAMES}, []
    figures: Figures = {
        FigureName.PEAK_HOST_MEMORY: _peak_host_memory(hosts),
        FigureName.CPU_UTILISATION: _mean_over(hosts, _cpu),
        FigureName.DEVICE_UTILISATION: _mean_over(hosts, _cpu if device_type == "cpu" else _utilisation),
        FigureName.TELEMETRY_CPU_TIME: _telemetry_cpu_time(hosts),
    }
    warnings: list[str] = []
    energy_j, power_w, reason = 0.0, 0.0, ""
    for host, (samples, spans) in hosts.items():
        if device_type == "cpu":
            energy = _packages_energy(samples, spans)
        else:
            energy, told = _devices_energy(samples, spans, host)
            warnings += told
        if energy.value is None or energy.mean is None:
            reason = _on(host, hosts, energy.reason or "")
            break
        energy_j += energy.value
        power_w += energy.mean
    measured = None if reason else energy_j
    figures[FigureName.ENERGY] = value(measured, reason)
    figures[FigureName.MEAN_POWER] = value(None if reason else power_w, reason)
    per_unit_reason = reason or "nothing was trained"
    figures[FigureName.ENERGY_PER_UNIT] = ratio(measured, units, per_unit_reason)
    figures[FigureName.UNITS_PER_JOULE] = ratio(units or None, measured, per_unit_reason)
    return figures, warnings


def _on(host: str, hosts: HostSamples, reason: str) -> str:
    return reason if len(hosts) == 1 else f"{host}: {reason}"


def _peak_host_memory(hosts: HostSamples) -> Figure:
    peaks = [
        number
        for samples, _ in hosts.values()
        for number in samples.host.get("mem_used_mib", ())
        if number == number
    ]  # fmt: skip
    return value(max(peaks, default=None), "telemetry read no host memory")


def _mean_over(hosts: HostSamples, of: Callable[[Samples, Spans], list[Integral]]) -> Figure:
    """Return the mean over devices of their time-weighted means; null when one of them has none."""
    means: list[float] = []
    for host, (samples, spans) in hosts.items():
        for integral in of(samples, spans):
            if integral.mean is None:
                return Figure(value=None, reason=_on(host, hosts, integral.reason or ""))
            means.append(integral.mean)
    return Figure(value=sum(means) / len(means)) if means else Figure(value=None, reason="telemetry saw no device")


def _cpu(samples: Samples, spans: Spans) -> list[Integral]:
    column = samples.host.get("cpu", ())
    return [integrate(samples.t, column, spans, largest_gap_s(samples.interval_s)) if column else _none(samples, "cpu")]


def _utilisation(samples: Samples, spans: Spans) -> list[Integral]:
    if not samples.devices:
        return [_none(samples, "devices")]
    gap_s = largest_gap_s(samples.interval_s)
    return [
        integrate(samples.times(columns), columns["utilisation"], spans, gap_s)
        if _any(columns.get("utilisation"))
        else _none(samples, "utilisation")
        for columns in samples.devices.values()
    ]


def _packages_energy(samples: Samples, spans: Spans) -> Integral:
    column = samples.host.get("rapl_j")
    if column is None or not _any(column):
        return _none(samples, "rapl_j")
    return counted(samples.t, column, spans, largest_gap_s(samples.interval_s))


def _devices_energy(samples: Samples, spans: Spans, host: str) -> tuple[Integral, list[str]]:
    """Add up trapezoids over the devices' power; a device inside another's reading is not counted twice."""
    warnings: list[str] = []
    total, mean = 0.0, 0.0
    if not samples.devices:
        return _none(samples, "devices"), warnings
    gap_s = largest_gap_s(samples.interval_s)
    for index, columns in samples.devices.items():
        if samples.infos.get(index, {}).get("power_in") in samples.devices:
            continue
        power, times = columns.get("power_w"), samples.times(columns)
        if power is None or not _any(power):
            return Integral(None, None, f"device {index}: {samples.reason('power_w')}"), warnings
        energy = integrate(times, power, spans, gap_s)
        if energy.value is None or energy.mean is None:
            return Integral(None, None, f"device {index}: {energy.reason}"), warnings
        total, mean = total + energy.value, mean + energy.mean
        counter = columns.get("energy_j")
        check = counted(times, counter, spans, gap_s) if counter is not None and _any(counter) else None
        if check and check.value and abs(check.value - energy.value) > COUNTER_TOLERANCE * check.value:
            warnings.append(
                f"{host} device {index}: power samples give {energy.value:.4g} J while training, its energy counter "
                f"{check.value:.4g} J"
            )
    return Integral(total, mean), warnings


def _any(column: object) -> bool:
    return column is not None and any(number == number for number in column)  # type: ignore[attr-defined]


def _none(samples: Samples, name: str) -> Integral:
    return Integral(None, None, samples.reason(name))


def _telemetry_cpu_time(hosts: HostSamples) -> Figure:
    total = 0.0
    for host, (samples, _) in hosts.items():
        used = (samples.footer or {}).get("cpu_time_s")
        if not isinstance(used, int | float):
            return Figure(value=None, reason=_on(host, hosts, "the sampler was ended before it could tell"))
        total += used
    return Figure(value=total)
