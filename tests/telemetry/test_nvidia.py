"""NVIDIA GPUs through a mock of NVML (no such GPU is here), and its chips, which must not be mixed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.device import SourceError
from accelmark.telemetry.forms import parse_output, telemetry_of
from accelmark.vendors.nvidia.telemetry import Source

NOT_SUPPORTED = "Not Supported"
GPU_LOST = "GPU is lost"


class NVMLError(Exception):
    """What every call raises when it cannot answer."""


class FakeNvml:
    """The part of ``pynvml`` that is read; ``refuse`` maps a function's name to the error it raises."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlMemory_v2 = 33554472  # noqa: N815 - NVML's name

    def __init__(self, num_gpus: int = 1, refuse: dict[str, str] | None = None, instant_mw: int = 57_300) -> None:
        self.num_gpus = num_gpus
        self.refuse = refuse or {}
        self.instant_mw = instant_mw
        self.energy_mj = 1_000_000
        self.throttle_mask = 0x1
        self.pids: list[int] = []
        self.shut = False

    def __getattribute__(self, name: str) -> Any:
        refuse = object.__getattribute__(self, "__dict__").get("refuse", {})
        if name in refuse:

            def refused(*_: object, **__: object) -> None:
                raise NVMLError(refuse[name])

            return refused
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, _handle: int) -> str:
        return "NVIDIA A100-SXM4-40GB"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-0000000{handle}"

    def nvmlDeviceGetPciInfo(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:07:00.0")

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetMemoryInfo(self, _handle: int, version: int | None = None) -> SimpleNamespace:
        # Version 1 counts the driver's reserve as used.
        used = 15 if version else 438
        return SimpleNamespace(total=40536 * 2**20, used=used * 2**20)

    def nvmlDeviceGetFieldValues(self, _handle: int, _fields: list[int]) -> list[SimpleNamespace]:
        code = 0 if self.instant_mw else 3
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=self.instant_mw))]

    def nvmlDeviceGetPowerUsage(self, _handle: int) -> int:
        return 60_000

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle: int) -> int:
        return 400_000

    def nvmlDeviceGetTemperature(self, _handle: int, _sensor: int) -> int:
        return 31

    def nvmlDeviceGetClockInfo(self, _handle: int, clock: int) -> int:
        return {1: 210, 2: 1215}[clock]

    def nvmlDeviceGetMaxClockInfo(self, _handle: int, _clock: int) -> int:
        return 1410

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: int) -> int:
        return self.throttle_mask

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: int) -> int:
        return self.energy_mj

    def nvmlDeviceGetTotalEccErrors(self, _handle: int, _kind: int, _counter: int) -> int:
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=512 << 20) for pid in self.pids]

    def nvmlDeviceGetPersistenceMode(self, _handle: int) -> int:
        return 1

    def nvmlDeviceGetEccMode(self, _handle: int) -> tuple[int, int]:
        return (1, 1)

    def nvmlDeviceGetMigMode(self, _handle: int) -> tuple[int, int]:
        return (0, 0)

    def nvmlDeviceGetVbiosVersion(self, _handle: int) -> str:
        return "92.00.45.00.05"


def test_all_values_of_a_gpu_are_read() -> None:
    nvml = FakeNvml()
    nvml.pids = [4242]
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
    assert nvml.shut


def test_unsupported_values_of_a_gpu_are_null_with_nvmls_reason() -> None:
    refused = ("TotalEnergyConsumption", "TotalEccErrors", "UtilizationRates", "FieldValues", "PowerUsage")
    refuse = dict.fromkeys((f"nvmlDeviceGet{name}" for name in refused), NOT_SUPPORTED)
    source = Source(FakeNvml(refuse=refuse))
    (info,) = source.open()
    (sample,) = source.sample()
    assert (sample.energy_j, sample.ecc_errors, sample.utilisation, sample.power_w) == (None, None, None, None)
    assert info.reasons == dict.fromkeys(("energy_j", "ecc_errors", "utilisation", "power_w"), "NVML: Not Supported")


def test_a_gpu_lost_mid_run_is_a_reason_and_not_a_zero() -> None:
    nvml = FakeNvml(num_gpus=2)
    source = Source(nvml)
    source.open()
    nvml.refuse = {name: GPU_LOST for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")}
    with pytest.raises(SourceError, match="GPU is lost"):
        source.sample()


def test_without_a_driver_the_reason_is_nvmls() -> None:
    with pytest.raises(SourceError, match="Driver Not Loaded"):
        Source(FakeNvml(refuse={"nvmlInit": "Driver Not Loaded"})).open()


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
