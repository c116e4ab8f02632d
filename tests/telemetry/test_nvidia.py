"""NVIDIA GPUs through a mock of NVML (no such GPU is here), and its chips, which must not be mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.device import SourceError
from accelmark.telemetry.forms import parse_output, telemetry_of
from accelmark.vendors.nvidia.telemetry import Source


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


def _fake(**answers: Any) -> SimpleNamespace:
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


def test_all_values_of_a_gpu_are_read() -> None:
    nvml = _fake()
    source = Source(nvml)
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
    source = Source(_fake(**_refusing("Not Supported", *(f"DeviceGet{name}" for name in refused))))
    (info,) = source.open()
    (sample,) = source.sample()
    assert (sample.energy_j, sample.ecc_errors, sample.utilisation, sample.power_w) == (None, None, None, None)
    assert info.reasons == dict.fromkeys(("energy_j", "ecc_errors", "utilisation", "power_w"), "NVML: Not Supported")


def test_a_gpu_lost_mid_run_is_a_reason_and_not_a_zero() -> None:
    source = Source(_fake(DeviceGetCount=2))
    source.open()
    source.library = _fake(**_refusing("GPU is lost", *(name for name in ANSWERS if name.startswith("DeviceGet"))))
    with pytest.raises(SourceError, match="GPU is lost"):
        source.sample()


def test_without_a_driver_the_reason_is_nvmls() -> None:
    with pytest.raises(SourceError, match="Driver Not Loaded"):
        Source(_fake(**_refusing("Driver Not Loaded", "Init"))).open()


@pytest.mark.parametrize(
    ("device_name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", ("H100", "SXM")), ("NVIDIA H100 PCIe", ("H100", "PCIe")),
        ("NVIDIA H100 NVL", ("H100", "NVL")), ("NVIDIA H200", ("H200", "SXM")), ("NVIDIA H200 NVL", ("H200", "NVL")),
        ("NVIDIA H800", ("H800", "SXM")), ("NVIDIA H800 PCIe", ("H800", "PCIe")), ("NVIDIA H20", ("H20", "")),
        ("NVIDIA A100-SXM4-40GB", ("A100", "SXM-40GB")), ("NVIDIA A100-SXM4-80GB", ("A100", "SXM-80GB")),
        ("NVIDIA A100-PCIE-40GB", ("A100", "PCIe-40GB")), ("NVIDIA A100 80GB PCIe", ("A100", "PCIe-80GB")),
        ("NVIDIA A800-SXM4-80GB", ("A800", "SXM-80GB")), ("NVIDIA A800 80GB PCIe", ("A800", "PCIe-80GB")),
        ("Tesla V100-SXM2-32GB", ("V100", "SXM2")), ("Tesla T4", ("T4", "")), ("NVIDIA A10", ("A10", "")),
        ("NVIDIA L40S", ("L40S", "")), ("NVIDIA L40", ("L40", "")), ("NVIDIA B200", ("B200", "SXM")),
        ("NVIDIA A10G", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA H100", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L4", ("L4", "")), ("", None),
    ],
)  # fmt: skip
def test_a_device_name_means_one_chip_or_none(device_name: str, chip: tuple[str, str] | None) -> None:
    found = load_vendor("nvidia").chip_of(device_name, None)
    assert (None if found is None else (found.name, found.variant)) == chip


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
