"""Read NVIDIA GPUs through NVML (the ``nvidia-ml-py`` package)."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from accelmark.spec.plugins.requirements import pip_install
from accelmark.telemetry.device import DeviceInfo, DeviceSample, LibrarySource, Readers

_MIB: Final = 1024.0 * 1024.0
_FIELD_POWER_INSTANT: Final = 186
"""``NVML_FI_DEV_POWER_INSTANT``; ``nvmlDeviceGetPowerUsage`` averages over a second since Ampere (except GA100)."""
_THROTTLE: Final = (
    "idle", "application_clocks", "software_power_cap", "hardware_slowdown", "sync_boost", "software_thermal",
    "hardware_thermal", "hardware_power_brake", "display_clock",
)  # fmt: skip
"""Reasons by their bit, from the lowest."""


class Source(LibrarySource):
    """All GPUs that NVML lists, in PCI bus order, which may differ from CUDA's."""

    module = "pynvml"
    title = "NVML"
    missing = f"nvidia-ml-py is not installed ({pip_install(['accelmark[nvidia]'])})"
    error = "NVMLError"
    essential = ("utilisation", "memory_used_mib", "temperature_c")

    def start(self) -> list[Any]:
        nvml = self.library
        nvml.nvmlInit()
        self._driver = _text(nvml.nvmlSystemGetDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        self._has_instant_power = [self._power_instant(handle) is not None for handle in handles]
        return handles

    def stop(self) -> None:
        self.library.nvmlShutdown()

    def readers(self, at: int) -> Readers:
        nvml, handle = self.library, self.handles[at]
        memory = cache(lambda: _memory(nvml, handle))
        return {
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_used_mib": lambda: memory().used / _MIB,
            "memory_total_mib": lambda: memory().total / _MIB,
            "power_w": lambda: self._power(at),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "throttle": lambda: _throttle(nvml, handle),
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "ecc_errors": lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
            "pids": lambda: dict(map(_process, nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        }

    def _power(self, at: int) -> float:
        instant = self._power_instant(self.handles[at]) if self._has_instant_power[at] else None
        return self.library.nvmlDeviceGetPowerUsage(self.handles[at]) / 1000 if instant is None else instant

    def _power_instant(self, handle: Any) -> float | None:
        nvml = self.library
        try:
            value = nvml.nvmlDeviceGetFieldValues(handle, [_FIELD_POWER_INSTANT])[0]
        except (nvml.NVMLError, AttributeError, IndexError):
            return None
        if value.nvmlReturn != 0 or value.value.uiVal <= 0:
            return None
        return float(value.value.uiVal) / 1000

    def info(self, at: int, first: DeviceSample, reasons: dict[str, str]) -> DeviceInfo:
        nvml, handle = self.library, self.handles[at]
        properties: Readers = {
            "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
            "bus_id": lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
        further: Readers = {
            "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "persistence_mode": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
            "ecc_enabled": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            "mig_enabled": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            "vbios": lambda: _text(nvml.nvmlDeviceGetVbiosVersion(handle)),
        }
        values = self.read(at, properties)
        values |= {"name": values["name"] or "unknown", "memory_total_mib": first.memory_total_mib}
        power = "instant" if self._has_instant_power[at] else "nvmlDeviceGetPowerUsage (may be a mean)"
        known = {name: str(value) for name, value in self.read(at, further).items() if value is not None}
        return DeviceInfo(at, driver=self._driver, details={"power": power} | known, reasons=reasons, **values)


def _memory(nvml: Any, handle: Any) -> Any:
    """Return memory information; version 2 separates memory reserved by the driver from used memory."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError, TypeError):
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _process(process: Any) -> tuple[int, float | None]:
    """Return a process and its memory in MiB, which some drivers do not report."""
    used = process.usedGpuMemory
    return int(process.pid), None if used is None else used / _MIB


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    names = tuple(name for bit, name in enumerate(_THROTTLE) if mask & 1 << bit)
    unknown = mask & -1 << len(_THROTTLE)
    return (*names, f"unknown_{unknown:#x}") if unknown else names


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
