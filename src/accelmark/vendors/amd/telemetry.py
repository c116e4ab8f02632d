"""Read AMD GPUs through ROCm's library (the ``amdsmi`` package)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, final

from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError

T = TypeVar("T")

_MICROJOULE: Final = 1e-6


@final
class Source:
    """All GPUs that amdsmi lists. Written from its documentation; names of some fields depend on the version.

    Args:
        smi: the ``amdsmi`` module; None: imported when the devices are opened.
    """

    def __init__(self, smi: Any = None) -> None:
        self._smi = smi
        self._handles: list[Any] = []
        self._missing: list[dict[str, str]] = []

    def open(self) -> tuple[DeviceInfo, ...]:
        """Initialise amdsmi and name the GPUs."""
        if self._smi is None:
            try:
                self._smi = importlib.import_module("amdsmi")
            except (ImportError, OSError, KeyError) as error:
                raise SourceError(f"amdsmi cannot be imported ({error}); it comes with ROCm") from error
        try:
            self._smi.amdsmi_init()
            self._handles = list(self._smi.amdsmi_get_processor_handles())
        except self._smi.AmdSmiException as error:
            raise SourceError(f"amdsmi: {error}") from error
        if not self._handles:
            raise SourceError("amdsmi shows no GPU")
        self._missing = [{} for _ in self._handles]
        first = self.sample()
        return tuple(self._info(at, first[at]) for at in range(len(self._handles)))

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read every GPU once; a field that amdsmi cannot read is None."""
        samples = tuple(self._sample(at) for at in range(len(self._handles)))
        if all(sample.utilisation is None and sample.memory_used_mib is None for sample in samples):
            reason = next(iter(self._missing[0].values()), "not open") if self._missing else "not open"
            raise SourceError(f"amdsmi no longer answers: {reason}")
        return samples

    def close(self) -> None:
        """Shut amdsmi down."""
        if self._smi is not None and self._handles:
            self._handles = []
            try:
                self._smi.amdsmi_shut_down()
            except self._smi.AmdSmiException:
                return

    def _sample(self, at: int) -> DeviceSample:
        smi, handle = self._smi, self._handles[at]
        clocks = smi.AmdSmiClkType
        busy = self._try(at, "utilisation", lambda: _first(smi.amdsmi_get_gpu_activity(handle), "gfx_activity"))
        memory = self._try(at, "memory_used_mib", lambda: smi.amdsmi_get_gpu_vram_usage(handle))
        errors = self._try(
            at, "ecc_errors", lambda: _first(smi.amdsmi_get_gpu_total_ecc_count(handle), "uncorrectable_count")
        )
        return DeviceSample(
            index=at,
            utilisation=None if busy is None else busy / 100,
            memory_used_mib=None if memory is None else _first(memory, "vram_used"),
            memory_total_mib=None if memory is None else _first(memory, "vram_total"),
            power_w=self._try(
                at,
                "power_w",
                lambda: _first(smi.amdsmi_get_power_info(handle), "current_socket_power", "average_socket_power"),
            ),
            temperature_c=self._try(at, "temperature_c", lambda: _hotspot(smi, handle)),
            sm_clock_mhz=self._try(
                at, "sm_clock_mhz", lambda: _first(smi.amdsmi_get_clock_info(handle, clocks.GFX), "clk", "cur_clk")
            ),
            memory_clock_mhz=self._try(
                at, "memory_clock_mhz", lambda: _first(smi.amdsmi_get_clock_info(handle, clocks.MEM), "clk", "cur_clk")
            ),
            energy_j=self._try(at, "energy_j", lambda: _energy_j(smi.amdsmi_get_energy_count(handle))),
            ecc_errors=None if errors is None else int(errors),
            pids=self._try(at, "pids", lambda: _pids(smi.amdsmi_get_gpu_process_list(handle))),
        )

    def _info(self, at: int, first: DeviceSample) -> DeviceInfo:
        smi, handle = self._smi, self._handles[at]
        limit = self._try(at, "limit", lambda: _first(smi.amdsmi_get_power_info(handle), "power_limit"))
        fields = set(DeviceSample.__dataclass_fields__)
        reasons = {name: reason for name, reason in self._missing[at].items() if name in fields}
        return DeviceInfo(
            index=at,
            name=self._try(at, "name", lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])) or "unknown",
            uuid=self._try(at, "uuid", lambda: str(smi.amdsmi_get_gpu_device_uuid(handle))),
            driver=self._try(at, "driver", lambda: str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])),
            bus_id=self._try(at, "bus_id", lambda: str(smi.amdsmi_get_gpu_device_bdf(handle))),
            memory_total_mib=first.memory_total_mib,
            # Some versions report microwatts.
            power_limit_w=limit / 1e6 if limit is not None and limit > 1e5 else limit,
            reasons=reasons | {"throttle": "not read from amdsmi"},
        )

    def _try(self, at: int, name: str, read: Callable[[], T]) -> T | None:
        try:
            value = read()
        except self._smi.AmdSmiException as error:
            self._missing[at][name] = f"amdsmi: {error}"
            return None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._missing[at][name] = f"this amdsmi gives it in another form: {error!r}"
            return None
        if value is None:
            self._missing[at][name] = "amdsmi gives N/A"
            return None
        self._missing[at].pop(name, None)
        return value


def _first(values: Mapping[str, Any], *names: str) -> float | None:
    """Return the first of ``names`` that is a number; amdsmi reports missing values as ``N/A``."""
    if not any(name in values for name in names):
        raise KeyError(names[0])
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _hotspot(smi: Any, handle: Any) -> float:
    kinds, current = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
    return float(smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, current))


def _energy_j(values: Mapping[str, Any]) -> float | None:
    count = _first(values, "energy_accumulator", "power")
    resolution = _first(values, "counter_resolution")
    return None if count is None or resolution is None else count * resolution * _MICROJOULE


def _pids(processes: Any) -> tuple[int, ...]:
    return tuple(sorted(int(process["pid"]) for process in processes))
