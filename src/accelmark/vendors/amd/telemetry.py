"""Read AMD GPUs through ROCm's library (the ``amdsmi`` package)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from accelmark.telemetry.device import DeviceInfo, DeviceSample, LibrarySource, Readers


class Source(LibrarySource):
    """All GPUs that amdsmi lists. Written from its documentation; names of some fields depend on the version."""

    module = title = "amdsmi"
    missing = "it comes with ROCm"
    error = "AmdSmiException"

    def start(self) -> list[Any]:
        self.library.amdsmi_init()
        return list(self.library.amdsmi_get_processor_handles())

    def stop(self) -> None:
        self.library.amdsmi_shut_down()

    def readers(self, at: int) -> Readers:
        smi, handle = self.library, self.handles[at]
        memory = cache(lambda: smi.amdsmi_get_gpu_vram_usage(handle))

        def clock(kind: str) -> float | None:
            clocks = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind))
            return _first(clocks, "clk", "cur_clk")

        return {
            "utilisation": lambda: _first(smi.amdsmi_get_gpu_activity(handle), "gfx_activity", divisor=100),
            "memory_used_mib": lambda: _first(memory(), "vram_used"),
            "memory_total_mib": lambda: _first(memory(), "vram_total"),
            "power_w": lambda: _first(
                smi.amdsmi_get_power_info(handle), "current_socket_power", "average_socket_power"
            ),
            "temperature_c": lambda: float(
                smi.amdsmi_get_temp_metric(
                    handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
                )
            ),
            "sm_clock_mhz": lambda: clock("GFX"),
            "memory_clock_mhz": lambda: clock("MEM"),
            "energy_j": lambda: _energy_j(smi.amdsmi_get_energy_count(handle)),
            "ecc_errors": lambda: _count(smi.amdsmi_get_gpu_total_ecc_count(handle)),
            "pids": lambda: {int(each["pid"]): None for each in smi.amdsmi_get_gpu_process_list(handle)},
        }

    def info(self, at: int, first: DeviceSample, reasons: dict[str, str]) -> DeviceInfo:
        smi, handle = self.library, self.handles[at]
        readers: Readers = {
            "name": lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
            "uuid": lambda: str(smi.amdsmi_get_gpu_device_uuid(handle)),
            "driver": lambda: str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]),
            "bus_id": lambda: str(smi.amdsmi_get_gpu_device_bdf(handle)),
            "power_limit_w": lambda: _first(smi.amdsmi_get_power_info(handle), "power_limit"),
        }
        values = self.read(at, readers)
        limit = values["power_limit_w"]
        values |= {"name": values["name"] or "unknown", "memory_total_mib": first.memory_total_mib}
        # Some versions report microwatts.
        values["power_limit_w"] = limit / 1e6 if limit is not None and limit > 1e5 else limit
        return DeviceInfo(index=at, **values, reasons=reasons | {"throttle": "not read from amdsmi"})


def _first(values: Mapping[str, Any], *names: str, divisor: float = 1.0) -> float | None:
    """Return the first of ``names`` that is a number; amdsmi reports missing values as ``N/A``."""
    if not any(name in values for name in names):
        raise KeyError(names[0])
    for name in names:
        value = values.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value / divisor
    return None


def _count(values: Mapping[str, Any]) -> int | None:
    count = _first(values, "uncorrectable_count")
    return None if count is None else int(count)


def _energy_j(values: Mapping[str, Any]) -> float | None:
    count, resolution_uj = _first(values, "energy_accumulator", "power"), _first(values, "counter_resolution")
    return None if count is None or resolution_uj is None else count * resolution_uj * 1e-6
