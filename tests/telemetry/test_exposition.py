from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelmark.telemetry.exposition import expose, last_sample

SAMPLE: dict[str, Any] = {
    "t": 1.0, "wall": 1000.5,
    "host": {"cpu": 0.25, "mem_used_mib": 2.0, "power_w": None},
    "devices": [{"index": 0, "power_w": 250.0, "sm_clock_mhz": 1500.0, "energy_j": 12.0, "throttle": ["x"]},
                {"index": 1, "power_w": None}],
}  # fmt: skip
NOW_S = 1001.0


def record(path: Path, *entries: dict[str, Any], torn: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn)
    return path


def test_prometheus_own_parser_reads_it(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = record(tmp_path / "round1" / "node" / "telemetry.jsonl", {"header": {}}, SAMPLE)
    text = expose([({"run": 'a"b\\c\nd'}, path)], now_s=NOW_S)
    found = {
        (sample.name, sample.labels.get("device")): sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["accelmark_host_cpu_ratio", None].value == 0.25
    assert found["accelmark_host_memory_used_bytes", None].value == 2 * 2**20
    assert found["accelmark_device_power_watts", "0"].value == 250.0
    assert found["accelmark_device_clock_hertz", "0"].value == 1.5e9
    assert found["accelmark_device_energy_joules_total", "0"].value == 12.0
    assert found["accelmark_sample_timestamp_seconds", None].value == 1000.5
    assert found["accelmark_host_cpu_ratio", None].labels["run"] == 'a"b\\c\nd'
    assert ("accelmark_device_power_watts", "1") not in found
    assert "accelmark_host_power_watts" not in text


def test_ended_incomplete_and_missing_records_are_left_out(tmp_path: Path) -> None:
    assert last_sample(record(tmp_path / "ended", SAMPLE, {"footer": {}})) is None
    assert last_sample(record(tmp_path / "torn", SAMPLE, torn='{"t": 2, "ho')) == SAMPLE
    assert last_sample(record(tmp_path / "damaged", SAMPLE, torn="not json\n")) == SAMPLE
    assert last_sample(tmp_path / "gone") is None
    assert expose([], now_s=NOW_S) == ""


@pytest.mark.parametrize(("interval_s", "age_s", "shown"), [(1, 29, True), (1, 31, False), (60, 500, True)])
def test_a_sample_of_a_killed_recorder_is_not_live(tmp_path: Path, interval_s: int, age_s: int, shown: bool) -> None:
    path = record(tmp_path / "c" / "round1" / "n" / "telemetry.jsonl", {"header": {"interval_s": interval_s}}, SAMPLE)
    assert bool(expose([({}, path)], now_s=SAMPLE["wall"] + age_s)) == shown
