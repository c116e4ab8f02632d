"""Tools' outputs are read right or not at all."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.forms import ToolRule, UnreadableError, Values, parse_number, parse_output, telemetry_of

RECORDED: Final = Path(__file__).parent / "recorded"

Expected = list[dict[str, float | str | None]]

EXPECTED: Final[dict[str, Expected]] = {
    "ascend/npu-smi-22.0.3.txt": [
        {"name": "910A", "power_w": None, "temperature_c": 43, "utilisation": 0, "memory_used_mib": 861,
         "memory_total_mib": 21534, "bus_id": "0000:81:00.0"},
    ],
    "ascend/npu-smi-25.2.0.txt": [
        {"name": "910B4-1", "power_w": 91.3, "temperature_c": 33, "memory_used_mib": 3197, "memory_total_mib": 65536},
        {"name": "910B4-1", "power_w": 88.1, "temperature_c": 32, "memory_used_mib": 3197, "memory_total_mib": 65536},
    ],
    "ascend/npu-smi-26.0.rc2.txt": [
        {"index": 0, "name": "Ascend910", "power_w": 162.6, "temperature_c": 34, "memory_used_mib": 3419},
        {"index": 1, "name": "Ascend910", "power_w": None, "temperature_c": 34, "memory_used_mib": 2874},
    ],
    "cambricon/cnmon-5.10.13.txt": [
        {"index": 0, "name": "MLU370-X8", "temperature_c": 32, "power_w": 106, "power_limit_w": 250,
         "memory_used_mib": 0, "memory_total_mib": 23374, "utilisation": 0, "ecc_errors": None},
        {"index": 1, "temperature_c": 39, "bus_id": "0000:3D:00.0"},
    ],
    "cambricon/cnmon-5.10.22.txt": [
        {"index": 0, "temperature_c": 28, "power_w": 107, "memory_total_mib": 20638, "ecc_errors": 0},
        {"index": 1, "temperature_c": 32, "power_w": 107},
    ],
    "iluvatar/ixsmi-4.3.8.txt": [
        {"index": 0, "name": "Iluvatar BI-V150", "power_w": None, "temperature_c": 40, "sm_clock_mhz": 1500,
         "memory_clock_mhz": 1600, "memory_used_mib": 64, "memory_total_mib": 32768, "utilisation": 0},
        {"index": 1, "power_w": 104, "power_limit_w": 350, "temperature_c": 39},
    ],
    "iluvatar/ixsmi-4.4.0.txt": [
        {"index": 0, "name": "Iluvatar MR-V100 DUO", "power_w": None, "sm_clock_mhz": 500},
        {"index": 1, "power_w": 40, "temperature_c": 36},
    ],
    "kunlunxin/xpu-smi-5.0.21.26.txt": [
        {"index": 0, "name": "P800 OAM", "power_w": 85, "power_limit_w": 400, "temperature_c": 37,
         "memory_used_mib": 0, "memory_total_mib": 98304, "utilisation": 0, "ecc_errors": 0},
    ],
    "kunlunxin/xpu-smi-515.58.txt": [{"index": 0, "power_w": 91, "memory_used_mib": 31058, "temperature_c": 39}],
    "mthreads/mthreads-gmi-3.3.5.json": [
        {"index": 0, "name": "MTT S5000", "power_w": 96.66, "temperature_c": 27, "memory_used_mib": 0,
         "memory_total_mib": 81920, "utilisation": 0, "driver": "3.3.5-server", "bus_id": "00000000:2a:00.0"},
    ],
    "metax/mx-smi-2.1.6.txt": [
        {"index": 0, "name": "MXC500", "power_w": 71, "temperature_c": 51, "memory_used_mib": 60982,
         "memory_total_mib": 65536, "utilisation": 0},
    ],
    "metax/mx-smi-2.1.12.txt": [
        {"index": 0, "name": "MetaX C550", "power_w": 97, "power_limit_w": None, "temperature_c": 34},
    ],
    "metax/mx-smi-2.2.4.txt": [
        {"index": 0, "name": "MetaX C550", "power_w": 53, "power_limit_w": 450, "temperature_c": 29},
        {"index": 1, "bus_id": "0000:34:00.0", "memory_used_mib": 858},
    ],
    "metax/mx-smi-2.3.1.txt": [
        {"index": 0, "name": "MetaX C500", "power_w": 37, "power_limit_w": 350, "temperature_c": 32,
         "memory_used_mib": 826, "memory_total_mib": 65536},
    ],
    "hygon/rocm-smi-dtk-23.10.1.txt": [
        {"index": 0, "temperature_c": 53, "power_w": 96, "power_limit_w": 300, "utilisation": 0},
        {"index": 1, "temperature_c": 53, "power_w": 96},
        {"index": 2, "temperature_c": 54, "power_w": 95},
    ],
    "hygon/hy-smi-dtk-26.04.txt": [{"index": 0, "temperature_c": 46, "power_w": 51, "power_limit_w": 400}],
    "tsingmicro/tsm_smi-line.txt": [
        {"index": 0, "name": "TX8110-64GB-PCIe", "temperature_c": 42, "power_w": 96, "power_limit_w": 200,
         "memory_used_mib": 15146, "memory_total_mib": 65536, "utilisation": 0},
    ],
}  # fmt: skip
"""File -> devices; of each, the fields that were read off by eye."""


def text_of(name: str) -> str:
    return (RECORDED / name).read_text()


def tool_of(vendor: str) -> ToolRule:
    tool = telemetry_of(load_vendor(vendor), vendor).tool
    assert tool is not None
    return tool


def _read(tool: ToolRule, text: str) -> tuple[Values, ...] | None:
    for form in tool.forms:
        try:
            return parse_output(text, form)
        except UnreadableError:
            continue
    return None


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_tool_output_is_parsed_correctly(name: str) -> None:
    devices = _read(tool_of(name.split("/", maxsplit=1)[0]), text_of(name))
    assert devices is not None
    assert len(devices) == len(EXPECTED[name])
    for device, expected in zip(devices, EXPECTED[name], strict=True):
        assert {field: device.get(field) for field in expected} == expected


def test_csv_columns_are_found_by_name() -> None:
    (form,) = tool_of("intel").forms
    names = ["Timestamp", "DeviceId", "GPU Power (W)", "GPU Memory Used (MiB)", "GPU Utilization (%)"]
    names += ["GPU Core Temperature (Celsius Degree)", "GPU Frequency (MHz)"]
    row = ["06:14:46.000", "0", "120.5", "4096", "45.0", "65", "2100"]
    for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 97):
        (device,) = parse_output(", ".join(names[at] for at in order) + "\n" + ", ".join(row[at] for at in order), form)
        assert device == {
            "index": 0, "utilisation": 0.45, "power_w": 120.5, "sm_clock_mhz": 2100, "temperature_c": 65,
            "memory_used_mib": 4096,
        }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(EXPECTED)), at=st.integers(0, 3000), cut=st.integers(0, 40), put=st.text(max_size=8))
def test_an_output_that_was_tampered_with_never_crashes_and_keeps_figures_plausible(
    name: str, at: int, cut: int, put: str
) -> None:
    text = text_of(name)
    at %= len(text)
    for device in _read(tool_of(name.split("/", maxsplit=1)[0]), text[:at] + put + text[at + cut :]) or ():
        utilisation, power = device.get("utilisation"), device.get("power_w")
        assert utilisation is None or (isinstance(utilisation, float) and 0 <= utilisation <= 1)
        assert power is None or (isinstance(power, float) and 0 <= power <= 5000)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("power_w", "57W", 57.0), ("power_w", "109.51 W", 109.51), ("power_w", "96660mW", 96.66),
        ("power_w", "N/A", None),
        ("temperature_c", "31C", 31.0), ("utilisation", "94%", 0.94), ("utilisation", "94", 0.94),
        ("memory_used_mib", "2GiB", 2048.0), ("memory_used_mib", "513MiB", 513.0), ("power_w", "-", None),
    ],
)  # fmt: skip
def test_a_number_is_read_in_the_unit_of_its_field(field: str, text: str, value: float | None) -> None:
    assert parse_number(field, text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("field", "text"),
    [("power_w", "31C"), ("temperature_c", "57W"), ("utilisation", "101%"), ("memory_total_mib", "0MiB"),
     ("temperature_c", "400"), ("power_w", "-3W"), ("power_w", "1e3W"), ("power_w", "OK"), ("ecc_errors", "3%")],
)  # fmt: skip
def test_a_number_with_another_unit_or_out_of_bounds_is_not_readable(field: str, text: str) -> None:
    with pytest.raises(UnreadableError):
        parse_number(field, text)
