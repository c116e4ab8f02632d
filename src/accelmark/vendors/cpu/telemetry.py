"""The CPU as a device: all cores together, with package power where RAPL may be read."""

from __future__ import annotations

import time
from typing import Final, final

import psutil

from accelmark.telemetry.host import CpuMeter
from accelmark.telemetry.rapl import Rapl, RaplError
from accelmark.telemetry.sample import DeviceInfo, DeviceSample
from accelmark.telemetry.sysinfo import cpu_model

_MIB: Final = 1024.0 * 1024.0
_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


@final
class Source:
    """All CPU packages of the host as device 0; its memory is the host's."""

    def __init__(self) -> None:
        self._rapl: Rapl | None = None
        self._energy: tuple[float, float] | None = None
        self._meter = CpuMeter()
        self._can_clock = True

    def open(self) -> tuple[DeviceInfo, ...]:
        """Find out what can be read."""
        reasons = {
            "throttle": "not read on CPUs",
            "ecc_errors": "not read on CPUs",
            "pids": "every process is on the CPU",
            "memory_clock_mhz": "not readable on CPUs",
        }
        try:
            self._rapl = Rapl()
        except RaplError as error:
            reasons["power_w"] = reasons["energy_j"] = str(error)
        if _temperature() is None:
            reasons["temperature_c"] = "no sensor of the CPU can be read"
        if _clock() is None:
            self._can_clock = False
            reasons["sm_clock_mhz"] = "the kernel gives no CPU frequency"
        total = psutil.virtual_memory().total / _MIB
        self._meter.busy()
        details = {"cores": str(psutil.cpu_count(logical=False)), "threads": str(psutil.cpu_count())}
        if self._rapl is not None:
            details["power"] = f"RAPL, {self._rapl.num_packages} package(s), mean since the sample before"
        return (DeviceInfo(0, cpu_model(), memory_total_mib=total, details=details, reasons=reasons),)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read the cores' use, memory, and energy."""
        memory = psutil.virtual_memory()
        energy, power = self._power()
        return (
            DeviceSample(
                index=0,
                utilisation=self._meter.busy(),
                memory_used_mib=(memory.total - memory.available) / _MIB,
                memory_total_mib=memory.total / _MIB,
                power_w=power,
                energy_j=energy,
                temperature_c=_temperature(),
                sm_clock_mhz=_clock() if self._can_clock else None,
            ),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _power(self) -> tuple[float | None, float | None]:
        if self._rapl is None:
            return None, None
        try:
            energy, now = self._rapl.energy_j(), time.monotonic()
        except RaplError:
            self._rapl = None
            return None, None
        before, self._energy = self._energy, (energy, now)
        if before is None or now <= before[1]:
            return energy, None
        return energy, (energy - before[0]) / (now - before[1])


def _temperature() -> float | None:
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):
        return None
    found = [entry.current for name in _SENSORS for entry in sensors.get(name, ())]
    return max(found) if found else None


def _clock() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return frequency.current if frequency is not None and frequency.current else None
