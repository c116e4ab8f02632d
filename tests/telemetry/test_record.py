"""The recorder as the real process it is, and its last sample as Prometheus metrics."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from accelmark.results.read.telemetry import read_samples
from accelmark.results.rounds.consumption import energy
from accelmark.telemetry.exposition import expose, last_sample
from accelmark.telemetry.record import LineFile
from tests.telemetry import recorder
from tests.telemetry.recorder import make_vendor, num_lines, recorded, start, stop, until, write_tool

CPU = recorder.SRC / "accelmark" / "vendors" / "cpu"


def _read_values(column: Iterable[float]) -> list[float]:
    return [value for value in column if not math.isnan(value)]


def test_a_run_is_recorded_and_flushed_when_it_is_told_to_end(tmp_path: Path) -> None:
    folder, _ = make_vendor(tmp_path)
    recording = recorded(tmp_path, folder, 6, '"power_w": 57.0')
    assert recording.footer is not None
    assert recording.malformed == 0
    assert [info["index"] for info in recording.header["devices"]] == [0, 1]
    assert recording.header["devices"][0]["reasons"]["throttle"] == f"not read from {tmp_path / 'acme-smi'}"
    assert recording.footer["samples"] == len(recording.t)
    assert recording.footer["cpu_time_s"] > 0
    assert not recording.is_edited
    file = tmp_path / "telemetry.jsonl"
    file.write_text(file.read_text().replace('"power_w": 57', '"power_w": 27', 1))
    assert read_samples(file).is_edited
    device = recording.devices[1]
    found = {name: set(_read_values(device[name])) for name in ("power_w", "temperature_c", "utilisation")}
    assert found == {"power_w": {58}, "temperature_c": {32}, "utilisation": {0.07}}
    power = [(t, watts) for t, watts in zip(recording.times(device), device["power_w"], strict=True) if watts == watts]
    start_s, end_s = power[0][0], power[-1][0]
    assert energy(power, start_s, end_s)[0] == pytest.approx(58 * (end_s - start_s), rel=0.02)


def test_samples_are_on_a_grid_that_does_not_drift(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CPU, 15)
    assert recording.footer is not None
    times = recording.t[:-1]  # the last sample is taken when the recorder is stopped
    steps = [(t - times[0]) / 0.1 for t in times]
    # However late single samples are on a busy machine, those that are missing were counted as missed.
    assert abs(recording.footer["missed"] - (math.floor(steps[-1] + 0.01) + 1 - len(steps))) <= 1
    assert all(after - before > 0 for before, after in itertools.pairwise(times))


def test_a_suspension_is_noted_and_an_interrupt_meant_for_the_ranks_does_not_end_the_recorder(tmp_path: Path) -> None:
    process = start(tmp_path, CPU)
    until(lambda: num_lines(tmp_path) >= 2)
    for number in (signal.SIGINT, signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
    until(lambda: num_lines(tmp_path, '"note"') > 0)
    before = num_lines(tmp_path)
    until(lambda: num_lines(tmp_path) >= before + 3)
    recording = stop(process, tmp_path)
    (note,) = recording.notes
    assert note.startswith("suspended: ")
    assert recording.footer is not None


def test_the_host_is_recorded_with_reasons_for_what_it_lacks(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CPU, 8, detached=True)
    host = recording.host
    assert host["mem_total_mib"][-2] > host["mem_used_mib"][-2] > 0
    assert host["rank_rss_mib"][-2] > 0
    assert _read_values(host["cpu"])
    for name in ("power_w", "rapl_j", "psi_cpu"):
        assert _read_values(host[name]) or name in recording.header["reasons"]
    info = json.loads((tmp_path / "sys_info.json").read_text())
    assert info["cpu"]["model"]
    assert info["devices"][0]["name"] == info["cpu"]["model"]


def test_logs_have_flagperfs_names_and_line_formats(tmp_path: Path) -> None:
    folder, _ = make_vendor(tmp_path)
    process = start(tmp_path, folder)
    until(lambda: (tmp_path / "acme_monitor.log").exists() and bool((tmp_path / "acme_monitor.log").read_text()))
    stop(process, tmp_path)
    block = (tmp_path / "acme_monitor.log").read_text().split("\n\n")[0].splitlines()
    time.strptime(block[0], "%Y-%m-%d-%H:%M:%S")
    assert block[1:] == ["31C 57W 15MiB 40536MiB 0%", "32C 58W 16MiB 40536MiB 7%"]
    stamp, fraction = (tmp_path / "mem_monitor.log").read_text().splitlines()[0].split("\t")
    time.strptime(stamp, "%Y-%m-%d-%H:%M:%S")
    assert 0 < float(fraction) < 1
    power = (tmp_path / "pwr_monitor.log").read_text()
    assert power.count("\n") >= 1
    assert shutil.which("ipmitool") or "not available: ipmitool is not installed" in power


def test_a_tool_that_disappears_mid_run_is_a_reason_and_the_host_goes_on(tmp_path: Path) -> None:
    folder, tool = make_vendor(tmp_path)
    process = start(tmp_path, folder)
    until(lambda: num_lines(tmp_path, "57.0") >= 3)
    tool.unlink()
    until(lambda: num_lines(tmp_path, "is not installed") >= 1)
    before = num_lines(tmp_path)
    until(lambda: num_lines(tmp_path) >= before + 3)
    recording = stop(process, tmp_path)
    assert recording.footer is not None
    (note,) = [note for note in recording.footer["notes"] if "is not installed" in note["what"]]
    assert note["count"] >= 1
    assert math.isnan(recording.devices[0]["power_w"][-1])


def test_a_tool_that_hangs_is_killed_and_does_not_hold_up_the_host(tmp_path: Path) -> None:
    folder, tool = make_vendor(tmp_path, timeout_s=0.5)
    process = start(tmp_path, folder)
    until(lambda: num_lines(tmp_path, "57.0") >= 2)
    marker = f"{os.getpid()}.25"
    write_tool(tool, f"#!/bin/sh\nsleep {marker} & sleep {marker}\n")
    before = num_lines(tmp_path)
    until(lambda: num_lines(tmp_path, "did not finish within 0.5 s") >= 1)
    assert num_lines(tmp_path) > before
    write_tool(tool, "#!/bin/sh\nexit 3\n")
    until(lambda: num_lines(tmp_path, "exited with status 3") >= 1)
    stop(process, tmp_path)
    left = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {marker}" not in left


def test_a_vendor_reader_that_raises_costs_device_telemetry_only(tmp_path: Path) -> None:
    folder, _ = make_vendor(tmp_path)
    (folder / "telemetry.py").write_text("raise ValueError('broken by its maker')\n")
    assert "ValueError: broken by its maker" in recorded(tmp_path, folder, 4).reason("devices")


def test_power_in_a_wrong_unit_is_refused_whatever_reads_it(tmp_path: Path) -> None:
    folder, _ = make_vendor(tmp_path)
    (folder / "telemetry.py").write_text(
        textwrap.dedent("""
            import itertools

            from accelmark.telemetry.device import DeviceInfo, DeviceSample

            number = itertools.count()

            class Source:
                def open(self):
                    return (DeviceInfo(0, "Acme"),)

                def sample(self):
                    return (DeviceSample(0, power_w=80000.0 + next(number)),)

                def close(self):
                    pass
        """)
    )
    recording = recorded(tmp_path, folder, 5)
    assert "power_w" not in recording.devices.get(0, {})
    assert recording.footer is not None
    (note,) = [note for note in recording.footer["notes"] if "power_w" in note["what"]]
    assert note["what"] == "device 0: power_w is out of bounds (0 to 5000 W). Check its unit."
    assert note["count"] >= 2


def test_a_killed_recorder_leaves_a_readable_record(tmp_path: Path) -> None:
    process = start(tmp_path, CPU)
    until(lambda: num_lines(tmp_path) >= 5)
    process.kill()
    process.communicate()
    recording = read_samples(tmp_path / "telemetry.jsonl")
    assert recording.footer is None
    assert len(recording.t) >= 3


def test_a_recorder_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = {"vendor": "cpu", "vendor_folder": str(CPU), "interval_s": 0.1}
    (tmp_path / "telemetry.json").write_text(json.dumps(config))
    starter = textwrap.dedent("""
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-m", "accelmark.telemetry.record", sys.argv[1]]).pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(recorder.SRC)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: num_lines(tmp_path) >= 3)
        parent.kill()
    until(lambda: num_lines(tmp_path, "footer") == 1)
    until(lambda: not _alive(pid))
    recording = read_samples(tmp_path / "telemetry.jsonl")
    assert any("has ended" in note for note in recording.notes)


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_full_disk_counts_lost_lines_and_never_merges_two_lines() -> None:
    """``/dev/full`` refuses every write as a full disk does."""
    full = LineFile(Path("/dev/full"))
    assert not full.write("x")
    assert (full.num_lost, full.last_error) == (1, "No space left on device")
    full.close()


def test_a_flagperf_script_named_by_the_vendor_is_recorded_and_writes_its_own_log(tmp_path: Path) -> None:
    folder, _ = make_vendor(tmp_path)
    text = (folder / "vendor.yaml").read_text()
    head = text[: text.index("telemetry:")]
    (folder / "vendor.yaml").write_text(head + "telemetry: {script: {file: acme_monitor.py}}\n")
    (folder / "acme_monitor.py").write_text(recorder.FLAGPERF_SCRIPT.format(pid_file=str(tmp_path / "pid"), pace_s=0.2))
    recording = recorded(tmp_path, folder, 2, '"power_w": 114')
    assert [info["memory_total_mib"] for info in recording.header["devices"]] == [32768, 32768]
    expected = {"temperature_c": (40, 34), "power_w": (114, 74), "memory_used_mib": (28653, 0)}
    for name, values in (expected | {"utilisation": (0.94, 0)}).items():
        assert [set(_read_values(recording.devices[at][name])) for at in (0, 1)] == [{value} for value in values], name
    assert (tmp_path / "acme_monitor.log").read_text().count("40C 114W 28653MiB 32768MiB 94%") >= 2
    until(lambda: not (tmp_path / "pid").exists())


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
