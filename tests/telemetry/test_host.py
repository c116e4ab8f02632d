"""Host, RAPL, IPMI, foreign processes and the machine's description."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelmark.telemetry.device import DeviceSample
from accelmark.telemetry.host import (
    HostSample,
    HostSampler,
    Rapl,
    RaplError,
    busy_host,
    busy_reasons,
    collect,
    cpu_model,
    foreign_processes,
    parse_dcmi,
    parse_sdr,
)
from accelmark.telemetry.sources import CommandError
from accelmark.vendors.cpu.telemetry import Source
from tests.telemetry.test_detect import text_of


def _zone(root: Path, number: int, name: str, energy_uj: int, range_uj: int = 262_143_328_850) -> Path:
    zone = root / f"intel-rapl:{number}"
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return zone


def test_rapl_sums_packages_and_unwraps_their_counters(tmp_path: Path) -> None:
    first = _zone(tmp_path, 0, "package-0", 262_143_000_000)
    second = _zone(tmp_path, 1, "package-1", 10)
    _zone(tmp_path, 2, "psys", 5)
    rapl = Rapl(tmp_path)
    assert rapl.num_packages == 2
    (first / "energy_uj").write_text("671150\n")  # wrapped: 328_850 to the end, 671_150 after
    (second / "energy_uj").write_text("2000010\n")
    assert rapl.energy_j() == pytest.approx(3.0)


def test_a_cpu_with_all_its_sensors_is_read_in_full(tmp_path: Path) -> None:
    """Mock: files as a kernel lays them out on bare metal, since this machine may be a virtual one."""
    zone = _zone(tmp_path / "class/powercap", 0, "package-0", 1_000_000)
    chip = tmp_path / "class/hwmon/hwmon3"
    chip.mkdir(parents=True)
    entries = (("name", "coretemp"), ("temp1_label", "Package id 0"), ("temp1_input", "54000"),
               ("temp2_label", "Core 0"), ("temp2_input", "61000"))  # fmt: skip
    for name, text in entries:
        (chip / name).write_text(text + "\n")
    clock = tmp_path / "devices/system/cpu/cpu0/cpufreq"
    clock.mkdir(parents=True)
    (clock / "scaling_cur_freq").write_text("2600123\n")
    source = Source(tmp_path)
    (info,) = source.open()
    began = time.monotonic()
    source.sample()
    time.sleep(0.1)
    (zone / "energy_uj").write_text("21000000\n")
    (sample,) = source.sample()
    took = time.monotonic() - began
    assert (sample.temperature_c, sample.sm_clock_mhz, sample.energy_j) == (54, 2600.123, 20)
    assert sample.power_w is not None
    assert 20 / took <= sample.power_w <= 20 / 0.1
    assert {"power_w", "temperature_c", "sm_clock_mhz"}.isdisjoint(info.reasons)
    assert sample.memory_used_mib is None, "the memory of the host is in its samples"
    assert "see rank_rss_mib" in info.reasons["memory_used_mib"]


def test_a_package_that_cannot_be_read_makes_the_sum_unknown(tmp_path: Path) -> None:
    _zone(tmp_path, 0, "package-0", 1)
    (_zone(tmp_path, 1, "package-1", 1) / "energy_uj").write_text("garbage")
    with pytest.raises(RaplError, match="intel-rapl:1"):
        Rapl(tmp_path)


def test_the_busy_share_and_the_ranks_memory_follow_a_process_that_works() -> None:
    working = "x = bytearray(64 << 20); print('working', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", working], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            sampler = HostSampler([process.pid])
            sampler.sample(time.monotonic())
            time.sleep(0.5)
            sample = sampler.sample(time.monotonic())
        finally:
            process.kill()
    assert sample.cpu is not None
    assert sample.cpu > 0
    assert sample.rank_rss_mib is not None
    assert sample.rank_rss_mib > 60


def test_a_process_on_a_device_that_the_run_did_not_start_is_foreign() -> None:
    gone = 2**22 + 1  # beyond the largest process ID
    with subprocess.Popen(["sleep", "30"]) as own, subprocess.Popen(["sleep", "30"]) as other:
        shared = DeviceSample(0, pids={own.pid: 1.0, other.pid: 1.0})
        found = foreign_processes([shared, DeviceSample(1, pids={gone: 1.0}), DeviceSample(2)], [own.pid])
        own.kill()
        other.kill()
    assert found == [f"process {other.pid} (sleep) on device 0", f"process {gone} (name not visible) on device 1"]


def test_a_busy_host_gets_findings_and_an_idle_one_gets_none() -> None:
    assert busy_reasons(HostSample(cpu=0.03, psi_cpu=0.5, psi_memory=0.0, psi_io=1.0, load1=9.0), 2) == ()
    reasons = busy_reasons(HostSample(cpu=0.8, psi_cpu=40.0), 2)
    assert len(reasons) == 2
    assert "80\u202f%" in reasons[0]
    assert busy_reasons(HostSample(load1=3.0), 2)


def test_the_host_is_checked_before_a_run() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as first, subprocess.Popen(command) as second:
        try:
            busy = busy_host()
        finally:
            first.kill()
            second.kill()
    # Two busy processes are more than a fifth of up to nine cores.
    assert any("cores are busy" in reason for reason in busy) or (os.cpu_count() or 1) > 9


def test_the_machines_description_holds_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_TOKEN", "hunter2-secret")
    text = json.dumps(collect())
    assert "hunter2-secret" not in text
    assert json.loads(text)["cpu"]["logical_cores"] >= 1
    assert cpu_model()


def test_the_whole_systems_power_is_the_controllers_instantaneous_one_or_that_of_exactly_one_sensor() -> None:
    assert parse_dcmi(text_of("ipmi/dcmi.txt")) == 220
    assert parse_sdr("Temp | 23 degrees C | ok\nPwr Consumption  | 336 Watts         | ok\nPS1 | 160 Watts | ok") == 336
    with pytest.raises(CommandError, match="no sensor"):
        parse_sdr("PS1 Input | 160 Watts | ok\nPwr Consumption | no reading | ns")
    with pytest.raises(CommandError, match="2 sensors with different values"):
        parse_sdr("Total_Power | 336 Watts | ok\nPwr Consumption | 300 Watts | ok")


def test_an_implausible_reading_of_the_controller_is_replaced_by_its_sensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ipmitool"
    dcmi, sdr = "Instantaneous power reading: 0 Watts", "Pwr Consumption | 336 Watts | ok"
    tool.write_text(f"#!/bin/sh\n[ $1 = dcmi ] && echo '{dcmi}' || echo '{sdr}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sampler, ends = HostSampler(power=True), time.monotonic() + 30
    while (power_w := sampler.sample(time.monotonic()).power_w) is None and time.monotonic() < ends:
        time.sleep(0.05)
    assert power_w == 336
