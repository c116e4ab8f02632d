"""Read the CPU as a device: all cores together, with package power if RAPL is readable."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import psutil

from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError
from accelmark.telemetry.host import CpuMeter, Rapl, cpu_model, text_of, thousandths

_MIB: Final = 1024.0 * 1024.0
_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_PACKAGE_LABELS: Final = ("Package", "Tctl", "Tdie")
_SYS: Final = Path("/sys")


class Source:
    """All CPU packages of the host as device 0, whose clock is that of core 0; samples of the host have its memory."""

    def __init__(self, sys_root: Path = _SYS) -> None:
        self._sys = sys_root
        self._clock = sys_root / "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
        self._temperatures: list[Path] = []
        self._rapl: Rapl | None = None
        self._energy: tuple[float, float] | None = None
        self._meter = CpuMeter()

    def open(self) -> tuple[DeviceInfo, ...]:
        """Detect the readable sensors."""
        reasons = {
            "throttle": "not read on CPUs",
            "ecc_errors": "not read on CPUs",
            "pids": "every process is on the CPU",
            "memory_used_mib": "the memory of the host is used by all processes; see rank_rss_mib",
            "memory_clock_mhz": "not readable on CPUs",
        }
        try:
            self._rapl = Rapl(self._sys / "class/powercap")
        except SourceError as error:
            reasons["power_w"] = reasons["energy_j"] = str(error)
        self._temperatures = []  # of packages: reading a core's sensor would wake the core
        for chip in sorted((self._sys / "class/hwmon").glob("hwmon*")):
            if text_of(chip / "name") in _SENSORS:
                inputs = sorted(chip.glob("temp*_input"))
                labels = {path: text_of(path.with_name(path.name.replace("_input", "_label"))) or "" for path in inputs}
                whole = [path for path, label in labels.items() if label.startswith(_PACKAGE_LABELS)]
                self._temperatures += whole[:1] or inputs[:1]
        if not self._temperatures:
            reasons["temperature_c"] = "no sensor of the CPU can be read"
        if thousandths(self._clock) is None:
            reasons["sm_clock_mhz"] = "the kernel gives no CPU frequency"
        total = psutil.virtual_memory().total / _MIB
        self._meter.busy()
        details = {"cores": str(psutil.cpu_count(logical=False)), "threads": str(psutil.cpu_count())}
        if self._rapl is not None:
            details["power"] = f"RAPL, {self._rapl.num_packages} package(s), mean since the sample before"
        return (DeviceInfo(0, cpu_model(), memory_total_mib=total, details=details, reasons=reasons),)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read utilisation and energy."""
        energy, power = self._power()
        temperatures = [value for path in self._temperatures if (value := thousandths(path)) is not None]
        return (
            DeviceSample(
                index=0,
                utilisation=self._meter.busy(),
                memory_total_mib=psutil.virtual_memory().total / _MIB,
                power_w=power,
                energy_j=energy,
                temperature_c=max(temperatures, default=None),
                sm_clock_mhz=thousandths(self._clock),
            ),
        )

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _power(self) -> tuple[float | None, float | None]:
        if self._rapl is None:
            return None, None
        try:
            energy, now = self._rapl.energy_j(), time.monotonic()
        except SourceError:
            self._rapl = None
            return None, None
        before, self._energy = self._energy, (energy, now)
        if before is None or now <= before[1]:
            return energy, None
        return energy, (energy - before[0]) / (now - before[1])
