"""Read NVIDIA GPUs through NVML (the ``nvidia-ml-py`` package)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeVar, final

from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError

T = TypeVar("T")

_MIB: Final = 1024.0 * 1024.0
_FIELD_POWER_INSTANT: Final = 186
"""``NVML_FI_DEV_POWER_INSTANT``; ``nvmlDeviceGetPowerUsage`` averages over a second since Ampere (except GA100)."""
_THROTTLE: Final = {
    0x0000000000000001: "idle",
    0x0000000000000002: "application_clocks",
    0x0000000000000004: "software_power_cap",
    0x0000000000000008: "hardware_slowdown",
    0x0000000000000010: "sync_boost",
    0x0000000000000020: "software_thermal",
    0x0000000000000040: "hardware_thermal",
    0x0000000000000080: "hardware_power_brake",
    0x0000000000000100: "display_clock",
}


@final
class Source:
    """All GPUs that NVML lists, in PCI bus order, which may differ from CUDA's.

    Args:
        nvml: the ``pynvml`` module; None: imported when the devices are opened.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self._instant_power: list[bool] = []
        self._missing: list[dict[str, str]] = []

    def open(self) -> tuple[DeviceInfo, ...]:
        """Initialise NVML and name the GPUs."""
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError as error:
                raise SourceError("nvidia-ml-py is not installed (pip install 'accelmark[nvidia]')") from error
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise SourceError(f"NVML: {error}") from error
        if not self._handles:
            raise SourceError("NVML shows no GPU")
        self._missing = [{} for _ in self._handles]
        self._instant_power = [self._power_instant(handle) is not None for handle in self._handles]
        first = self.sample()
        return tuple(self._info(at, driver, first[at]) for at in range(len(self._handles)))

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read every GPU once; a field that NVML cannot read is None."""
        samples = tuple(self._sample(at) for at in range(len(self._handles)))
        if all(_nothing_read(sample) for sample in samples):
            reason = next(iter(self._missing[0].values()), "no reason given") if self._missing else "not open"
            raise SourceError(f"NVML no longer answers: {reason}")
        return samples

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml is not None and self._handles:
            self._handles = []
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return

    def _sample(self, at: int) -> DeviceSample:
        nvml, handle = self._nvml, self._handles[at]
        rates = self._try(at, "utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._try(at, "memory_used_mib", lambda: _memory(nvml, handle))
        energy = self._try(at, "energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return DeviceSample(
            index=at,
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used_mib=None if memory is None else memory.used / _MIB,
            memory_total_mib=None if memory is None else memory.total / _MIB,
            power_w=self._power(at),
            temperature_c=self._try(
                at, "temperature_c", lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            sm_clock_mhz=self._try(
                at, "sm_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            ),
            memory_clock_mhz=self._try(
                at, "memory_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
            ),
            throttle=self._try(at, "throttle", lambda: _throttle(nvml, handle)),
            energy_j=None if energy is None else energy / 1000,
            ecc_errors=self._try(at, "ecc_errors", lambda: _ecc_errors(nvml, handle)),
            pids=self._try(at, "pids", lambda: _pids(nvml, handle)),
        )

    def _power(self, at: int) -> float | None:
        handle = self._handles[at]
        if self._instant_power[at]:
            instant = self._power_instant(handle)
            if instant is not None:
                return instant
        usage = self._try(at, "power_w", lambda: self._nvml.nvmlDeviceGetPowerUsage(handle))
        return None if usage is None else usage / 1000

    def _power_instant(self, handle: Any) -> float | None:
        nvml = self._nvml
        try:
            value = nvml.nvmlDeviceGetFieldValues(handle, [_FIELD_POWER_INSTANT])[0]
        except (nvml.NVMLError, AttributeError, IndexError):
            return None
        if value.nvmlReturn != 0 or value.value.uiVal <= 0:
            return None
        return float(value.value.uiVal) / 1000

    def _info(self, at: int, driver: str, first: DeviceSample) -> DeviceInfo:
        nvml, handle = self._nvml, self._handles[at]
        limit = self._try(at, "power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        name = self._try(at, "name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
        bus = self._try(at, "bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        details = {"power": "instant" if self._instant_power[at] else "nvmlDeviceGetPowerUsage (may be a mean)"}
        readers: dict[str, Callable[[], object]] = {
            "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "persistence_mode": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
            "ecc_enabled": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            "mig_enabled": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            "vbios": lambda: _text(nvml.nvmlDeviceGetVbiosVersion(handle)),
        }
        for key, reader in readers.items():
            value = self._try(at, key, reader)
            if value is not None:
                details[key] = str(value)
        fields = set(DeviceSample.__dataclass_fields__)
        return DeviceInfo(
            index=at,
            name=name or "unknown",
            uuid=self._try(at, "uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            driver=driver,
            memory_total_mib=first.memory_total_mib,
            power_limit_w=None if limit is None else limit / 1000,
            bus_id=bus,
            details=details,
            reasons={field: reason for field, reason in self._missing[at].items() if field in fields},
        )

    def _try(self, at: int, name: str, read: Callable[[], T]) -> T | None:
        try:
            value = read()
        except self._nvml.NVMLError as error:
            self._missing[at][name] = f"NVML: {error}"
            return None
        except AttributeError as error:
            self._missing[at][name] = f"this nvidia-ml-py lacks it: {error}"
            return None
        self._missing[at].pop(name, None)
        return value


def _memory(nvml: Any, handle: Any) -> Any:
    """Return memory information; version 2 separates memory reserved by the driver from used memory."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError, TypeError):
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    names = tuple(name for bit, name in _THROTTLE.items() if mask & bit)
    unknown = mask & ~sum(_THROTTLE)
    return (*names, f"unknown_{unknown:#x}") if unknown else names


def _ecc_errors(nvml: Any, handle: Any) -> int:
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))


def _pids(nvml: Any, handle: Any) -> tuple[int, ...]:
    return tuple(sorted(int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))


def _nothing_read(sample: DeviceSample) -> bool:
    return sample.utilisation is None and sample.memory_used_mib is None and sample.temperature_c is None


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
