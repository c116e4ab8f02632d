"""AMD GPUs through a mock of amdsmi (no such GPU is here); its answers follow amdsmi's documentation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.device import SourceError
from accelmark.vendors.amd.telemetry import Source


class AmdSmiException(Exception):  # noqa: N818 - amdsmi's name
    pass


def _fake(**answers: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {
        "amdsmi_init": None,
        "amdsmi_shut_down": None,
        "amdsmi_get_processor_handles": ["gpu0"],
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
        **{
            name: Mock(side_effect=answer if isinstance(answer, Exception) else lambda *_, answer=answer: answer)
            for name, answer in (usual | answers).items()
        },
    )


def test_all_values_of_a_gpu_are_read() -> None:
    source = Source(_fake())
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


def test_missing_values_are_null_with_a_reason() -> None:
    smi = _fake(
        amdsmi_get_power_info={"current_socket_power": "N/A", "average_socket_power": "N/A"},
        amdsmi_get_energy_count=AmdSmiException("not supported"),
        amdsmi_get_gpu_total_ecc_count={"another_name": 1},
    )
    source = Source(smi)
    (info,) = source.open()
    (sample,) = source.sample()
    assert (sample.power_w, sample.energy_j, sample.ecc_errors) == (None, None, None)
    assert info.reasons["power_w"] == "amdsmi gives N/A"
    assert info.reasons["energy_j"] == "amdsmi: not supported"
    assert "another form" in info.reasons["ecc_errors"]


def test_a_gpu_that_is_lost_is_a_reason() -> None:
    lost = AmdSmiException("device lost")
    with pytest.raises(SourceError, match="device lost"):
        Source(_fake(amdsmi_get_gpu_activity=lost, amdsmi_get_gpu_vram_usage=lost)).open()


def test_without_rocm_the_reason_names_it() -> None:
    with pytest.raises(SourceError, match="comes with ROCm"):
        Source().open()
