"""NVIDIA GPUs through a mock of NVML (no such GPU is here), and its chips, which must not be mixed up."""

from __future__ import annotations

import pytest

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.device import SourceError
from accelmark.telemetry.forms import parse_output, telemetry_of
from accelmark.vendors.nvidia.telemetry import Source
from tests.telemetry.fake_nvml import GPU_LOST, NOT_SUPPORTED, FakeNvml


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
