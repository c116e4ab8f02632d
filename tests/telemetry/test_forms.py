"""Tools' outputs are read right or not at all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.spec.plugins.catalog import folders, load_vendor
from accelmark.telemetry.forms import Form, ToolRule, UnreadableError, Values, parse_number, parse_output, telemetry_of
from tests.telemetry.recordings import EXPECTED, text_of, tool_of


def _read(tool: ToolRule, text: str) -> tuple[Values, ...] | None:
    for form in tool.forms:
        try:
            return parse_output(text, form)
        except UnreadableError:
            continue
    return None


def _tools() -> list[tuple[str, ToolRule]]:
    telemetry = {name: telemetry_of(load_vendor(name), name) for name in folders("vendors")}
    return [(name, one.tool) for name, one in telemetry.items() if one.tool is not None]


FORMS: list[Form] = [form for _, tool in _tools() for form in tool.forms]


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
        text = ", ".join(names[at] for at in order) + "\n" + ", ".join(row[at] for at in order)
        (device,) = parse_output(text, form)
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
    devices = _read(tool_of(name.split("/", maxsplit=1)[0]), text[:at] + put + text[at + cut :])
    for device in devices or ():
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


def test_every_rule_names_the_source_of_its_format() -> None:
    assert all(len(form.source) > 20 for form in FORMS)
