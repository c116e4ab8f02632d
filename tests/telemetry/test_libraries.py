"""GPUs of NVIDIA and AMD through mocks of their libraries (no such GPU is here)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.device import DeviceSource, SourceError
from accelmark.telemetry.forms import parse_output, telemetry_of
from accelmark.vendors.amd.telemetry import Source as AmdSource
from accelmark.vendors.nvidia.telemetry import Source as NvidiaSource


class NVMLError(Exception):
    """What every call raises when it cannot answer."""


def _memory(_handle: int, version: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(total=40536 * 2**20, used=(15 if version else 438) * 2**20)  # 1 counts the driver's reserve


ANSWERS: dict[str, Any] = {
    "Init": None, "Shutdown": None, "SystemGetDriverVersion": "550.54.15", "DeviceGetCount": 1,
    "DeviceGetHandleByIndex": lambda index: index, "DeviceGetName": "NVIDIA A100-SXM4-40GB",
    "DeviceGetUUID": "GPU-00000000", "DeviceGetPciInfo": SimpleNamespace(busId=b"00000000:07:00.0"),
    "DeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0), "DeviceGetMemoryInfo": _memory,
    "DeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=57_300))],
    "DeviceGetPowerUsage": 60_000, "DeviceGetEnforcedPowerLimit": 400_000, "DeviceGetTemperature": 31,
    "DeviceGetClockInfo": lambda _handle, clock: {1: 210, 2: 1215}[clock], "DeviceGetMaxClockInfo": 1410,
    "DeviceGetCurrentClocksEventReasons": 0x1, "DeviceGetTotalEnergyConsumption": 1_000_000,
    "DeviceGetTotalEccErrors": 0, "DeviceGetPersistenceMode": 1, "DeviceGetEccMode": (1, 1),
    "DeviceGetMigMode": (0, 0), "DeviceGetVbiosVersion": "92.00.45.00.05",
    "DeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4242, usedGpuMemory=512 << 20)],
}  # fmt: skip


def _nvml(**answers: Any) -> SimpleNamespace:
    """The part of ``pynvml`` that is read; an exception among the answers is raised."""
    constants = {
        "NVMLError": NVMLError, "NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0, "nvmlMemory_v2": 33554472,
    }  # fmt: skip
    calls = {f"nvml{name}": Mock(side_effect=_effect(answer)) for name, answer in (ANSWERS | answers).items()}
    return SimpleNamespace(**constants, **calls)


def _effect(answer: Any) -> Any:
    return answer if callable(answer) or isinstance(answer, Exception) else lambda *_: answer


def _refusing(text: str, *names: str) -> dict[str, Exception]:
    return dict.fromkeys(names, NVMLError(text))


def test_all_values_of_an_nvidia_gpu_are_read() -> None:
    nvml = _nvml()
    source = NvidiaSource(nvml)
    (info,) = source.open()
    (sample,) = source.sample()
    source.close()
    assert (info.name, info.driver, info.power_limit_w) == ("NVIDIA A100-SXM4-40GB", "550.54.15", 400)
    assert info.details["power"] == "instant"
    assert info.reasons == {}
    assert (sample.temperature_c, sample.power_w, sample.memory_used_mib) == (31, 57.3, 15)
    assert (sample.memory_total_mib, sample.utilisation, sample.energy_j) == (40536, 0, 1000)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz, sample.ecc_errors) == (210, 1215, 0)
    assert (sample.throttle, sample.pids) == (("idle",), {4242: 512.0})
    assert nvml.nvmlShutdown.called


def test_unsupported_values_of_a_gpu_are_null_with_nvmls_reason() -> None:
    refused = ("TotalEnergyConsumption", "TotalEccErrors", "UtilizationRates", "FieldValues", "PowerUsage")
    source = NvidiaSource(_nvml(**_refusing("Not Supported", *(f"DeviceGet{name}" for name in refused))))
    (info,) = source.open()
    (sample,) = source.sample()
    assert (sample.energy_j, sample.ecc_errors, sample.utilisation, sample.power_w) == (None, None, None, None)
    assert info.reasons == dict.fromkeys(("energy_j", "ecc_errors", "utilisation", "power_w"), "NVML: Not Supported")


def test_a_gpu_lost_mid_run_is_a_reason_and_not_a_zero() -> None:
    source = NvidiaSource(_nvml(DeviceGetCount=2))
    source.open()
    source.library = _nvml(**_refusing("GPU is lost", *(name for name in ANSWERS if name.startswith("DeviceGet"))))
    with pytest.raises(SourceError, match="GPU is lost"):
        source.sample()


def test_nvidia_smi_is_read_by_the_names_of_its_columns() -> None:
    """The heading is that of ``nvidia-smi --query-gpu=… --format=csv``, the values those of the mock."""
    tool = telemetry_of(load_vendor("nvidia"), "nvidia").tool
    assert tool is not None
    text = (
        "index, name, uuid, pci.bus_id, driver_version, power.limit [W], utilization.gpu [%], memory.used [MiB], "
        "memory.total [MiB], power.draw [W], temperature.gpu, clocks.current.sm [MHz], clocks.current.memory [MHz], "
        "ecc.errors.uncorrected.volatile.total\n"
        "0, NVIDIA A100-SXM4-40GB, GPU-1, 00000000:07:00.0, 550.54.15, 400.00 W, 0 %, 15 MiB, 40536 MiB, 57.30 W, 31, "
        "210 MHz, 1215 MHz, [N/A]\n"
    )
    (device,) = parse_output(text, tool.forms[0])
    assert (device["power_w"], device["memory_used_mib"], device["ecc_errors"]) == (57.3, 15, None)


class AmdSmiException(Exception):  # noqa: N818 - amdsmi's name
    pass


def _amdsmi(**answers: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {
        "amdsmi_init": None, "amdsmi_shut_down": None, "amdsmi_get_processor_handles": ["gpu0"],
        "amdsmi_get_gpu_activity": {"gfx_activity": 87, "umc_activity": 12, "mm_activity": "N/A"},
        "amdsmi_get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 285},
        "amdsmi_get_power_info": {
            "current_socket_power": 143, "average_socket_power": "N/A", "power_limit": 750_000_000,
        },
        "amdsmi_get_temp_metric": 41,
        "amdsmi_get_clock_info": {"clk": 132, "min_clk": 132, "max_clk": 2100},
        "amdsmi_get_energy_count": {"energy_accumulator": 1_000_000, "counter_resolution": 15.259, "timestamp": 1},
        "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 3, "uncorrectable_count": 0},
        "amdsmi_get_gpu_process_list": [{"name": "python", "pid": 4242}],
        "amdsmi_get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
        "amdsmi_get_gpu_driver_info": {"driver_version": "6.10.5"},
        "amdsmi_get_gpu_device_uuid": "cd-74a1",
        "amdsmi_get_gpu_device_bdf": "0000:05:00.0",
    }  # fmt: skip

    return SimpleNamespace(
        AmdSmiException=AmdSmiException,
        AmdSmiClkType=SimpleNamespace(GFX=0, MEM=4),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        **{name: Mock(side_effect=_effect(answer)) for name, answer in (usual | answers).items()},
    )


def test_all_values_of_an_amd_gpu_are_read() -> None:
    source = AmdSource(_amdsmi())
    (info,) = source.open()
    (sample,) = source.sample()
    assert (info.name, info.driver, info.power_limit_w, info.memory_total_mib) == (
        "AMD Instinct MI300X", "6.10.5", 750, 196592,
    )  # fmt: skip
    assert (sample.utilisation, sample.power_w, sample.temperature_c, sample.sm_clock_mhz) == (0.87, 143, 41, 132)
    assert (sample.ecc_errors, sample.pids) == (0, {4242: None})
    assert sample.energy_j == pytest.approx(15.259)
    chip = load_vendor("amd").chip_of(info.name, info.memory_gib)
    assert chip is not None
    assert chip.peaks.bf16 == 1307.4


def test_missing_values_of_an_amd_gpu_are_null_with_a_reason() -> None:
    smi = _amdsmi(
        amdsmi_get_power_info={"current_socket_power": "N/A", "average_socket_power": "N/A"},
        amdsmi_get_energy_count=AmdSmiException("not supported"),
        amdsmi_get_gpu_total_ecc_count={"another_name": 1},
    )
    source = AmdSource(smi)
    (info,) = source.open()
    (sample,) = source.sample()
    assert (sample.power_w, sample.energy_j, sample.ecc_errors) == (None, None, None)
    assert info.reasons["power_w"] == "amdsmi gives N/A"
    assert info.reasons["energy_j"] == "amdsmi: not supported"
    assert "another form" in info.reasons["ecc_errors"]


LOST = AmdSmiException("device lost")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (NvidiaSource(_nvml(**_refusing("Driver Not Loaded", "Init"))), "Driver Not Loaded"),
        (AmdSource(_amdsmi(amdsmi_get_gpu_activity=LOST, amdsmi_get_gpu_vram_usage=LOST)), "device lost"),
        (AmdSource(), "comes with ROCm"),
    ],
)
def test_gpus_that_cannot_be_opened_have_the_librarys_reason(source: DeviceSource, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        source.open()
