"""What is on a machine is found and described, its host is sampled, and tools' outputs are read right or not at all.

GPUs of NVIDIA and AMD are read through mocks of their libraries (no such GPU is here).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.cli.machine import detect_devices
from accelmark.cli.runs import plan_request
from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, folders, load_vendor
from accelmark.spec.runfile import RunSpec
from accelmark.telemetry import forms, host
from accelmark.telemetry.device import DeviceSample, DeviceSource, SourceError
from accelmark.telemetry.inventory import default_vendor, detect, evidence_of
from accelmark.telemetry.sources import ToolSource
from accelmark.vendors.amd.telemetry import Source as AmdSource
from accelmark.vendors.cpu.telemetry import Source
from accelmark.vendors.nvidia.telemetry import Source as NvidiaSource
from tests.telemetry.recorder import SRC, make_vendor


def test_devices_are_found_by_their_files_and_by_pci(tmp_path: Path) -> None:
    rule = forms.Detect(device_files=("davinci[0-9]*",), pci=("0x19e5:0x1200",))
    assert evidence_of(rule, [], tmp_path) is None
    assert evidence_of(rule, ["0x19e5:0x120000"], tmp_path) == "PCI device 0x19e5:0x1200"
    (tmp_path / "davinci_manager").touch()
    assert evidence_of(rule, ["0x19e5:0x020000"], tmp_path) is None  # Huawei's network card is no chip
    (tmp_path / "davinci0").touch()
    assert evidence_of(rule, [], tmp_path) == f"device file {tmp_path / 'davinci0'}"


def test_without_accelerators_the_cpu_is_measured() -> None:
    found = detect(["cpu"])
    assert [entry.vendor for entry in found] == ["cpu"]
    assert (found[0].hardware, found[0].chips) == ("CPU", (None,))
    assert found[0].devices[0].memory_total_mib
    assert default_vendor() in folders("vendors")


def test_a_vendor_that_is_not_known_or_broken_keeps_no_other_from_being_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_vendor(tmp_path / "vendors")
    (folder / "vendor.yaml").write_text("name: acme\ntitel: typo\n")
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    assert "cpu" in [entry.vendor for entry in detect(read=False)]
    with pytest.raises(SpecError, match="did you mean 'title'"):
        load_vendor("acme")


def test_several_vendors_with_devices_here_are_a_warning_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zenith", "acme"):
        folder, _ = make_vendor(tmp_path / name)
        text = (folder / "vendor.yaml").read_text().replace("name: acme", f"name: {name}")
        target = tmp_path / "vendors" / name
        target.mkdir(parents=True)
        found = "telemetry:\n  detect: {device_files: ['null']}"
        (target / "vendor.yaml").write_text(text.replace("telemetry:", found))
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    monkeypatch.setattr("accelmark.telemetry.inventory.folders", lambda kind: ("acme", "cpu", "zenith"))
    chosen = detect_devices(None)
    assert (chosen.vendor, chosen.others) == ("acme", ("zenith",))
    request = parse(RunSpec, {"cases": ["resnet_mini"]}, "run.yaml")
    planned = plan_request(request, (), synthetic=True)
    said = "this machine also has devices of zenith; acme is measured: choose with --vendor"
    assert said in planned.warnings
    named = plan_request(request.model_copy(update={"vendor": "zenith"}), (), synthetic=True)
    assert named.vendor == "zenith"
    assert not any("also has devices" in warning for warning in named.warnings)


def test_telemetry_imports_no_framework_and_nothing_heavy() -> None:
    program = (
        "import sys\nimport accelmark.telemetry.inventory, accelmark.telemetry.record\n"
        "from accelmark.telemetry.inventory import detect\ndetect()\n"
        "print([name for name in ('torch', 'numpy', 'scipy', 'plotly', 'transformers') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_one_card_with_two_dies_reports_power_in_one_of_them(tmp_path: Path) -> None:
    for vendor, file, leader in (
        ("iluvatar", "ixsmi-4.3.8.txt", {0: 1, 1: None}),
        ("ascend", "npu-smi-26.0.rc2.txt", {0: None, 1: 0}),
    ):
        source = ToolSource(tool_of(vendor).model_copy(update={"command": ("cat", str(RECORDED / vendor / file))}))
        assert {info.index: info.power_in for info in source.open()} == leader
        assert source.sample()[0].memory_used_mib


RECORDED: Final = Path(__file__).parent / "recorded"

EXPECTED: Final[dict[str, list[dict[str, float | str | None]]]] = {
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


def tool_of(vendor: str) -> forms.ToolRule:
    tool = forms.telemetry_of(load_vendor(vendor), vendor).tool
    assert tool is not None
    return tool


def _read(tool: forms.ToolRule, text: str) -> tuple[forms.Values, ...] | None:
    for form in tool.forms:
        try:
            return forms.parse_output(text, form)
        except SourceError:
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
        (device,) = forms.parse_output(
            ", ".join(names[at] for at in order) + "\n" + ", ".join(row[at] for at in order), form
        )
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
    assert forms.parse_number(field, text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("field", "text"),
    [("power_w", "31C"), ("temperature_c", "57W"), ("utilisation", "101%"), ("memory_total_mib", "0MiB"),
     ("temperature_c", "400"), ("power_w", "-3W"), ("power_w", "1e3W"), ("power_w", "OK"), ("ecc_errors", "3%")],
)  # fmt: skip
def test_a_number_with_another_unit_or_out_of_bounds_is_not_readable(field: str, text: str) -> None:
    with pytest.raises(SourceError):
        forms.parse_number(field, text)


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
    rapl = host.Rapl(tmp_path)
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
    with pytest.raises(SourceError, match="intel-rapl:1"):
        host.Rapl(tmp_path)


def test_the_busy_share_and_the_ranks_memory_follow_a_process_that_works() -> None:
    working = "x = bytearray(64 << 20); print('working', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", working], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            sampler = host.HostSampler([process.pid])
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
        found = host.foreign_processes([shared, DeviceSample(1, pids={gone: 1.0}), DeviceSample(2)], [own.pid])
        own.kill()
        other.kill()
    assert found == [f"process {other.pid} (sleep) on device 0", f"process {gone} (name not visible) on device 1"]


def test_a_busy_host_gets_findings_and_an_idle_one_gets_none() -> None:
    assert host.busy_reasons(host.HostSample(cpu=0.03, psi_cpu=0.5, psi_memory=0.0, psi_io=1.0, load1=9.0), 2) == ()
    reasons = host.busy_reasons(host.HostSample(cpu=0.8, psi_cpu=40.0), 2)
    assert len(reasons) == 2
    assert "80\u202f%" in reasons[0]
    assert host.busy_reasons(host.HostSample(load1=3.0), 2)


def test_the_host_is_checked_before_a_run() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as first, subprocess.Popen(command) as second:
        try:
            busy = host.busy_host()
        finally:
            first.kill()
            second.kill()
    # Two busy processes are more than a fifth of up to nine cores.
    assert any("cores are busy" in reason for reason in busy) or (os.cpu_count() or 1) > 9


def test_the_machines_description_holds_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_TOKEN", "hunter2-secret")
    text = json.dumps(host.collect())
    assert "hunter2-secret" not in text
    assert json.loads(text)["cpu"]["logical_cores"] >= 1
    assert host.cpu_model()


def test_the_whole_systems_power_is_the_controllers_instantaneous_one_or_that_of_exactly_one_sensor() -> None:
    assert host.ipmi_power_w("dcmi power reading", text_of("ipmi/dcmi.txt")) == 220
    text = "Temp | 23 degrees C | ok\nPwr Consumption  | 336 Watts         | ok\nPS1 | 160 Watts | ok"
    assert host.ipmi_power_w("sdr", text) == 336
    with pytest.raises(SourceError, match="no sensor"):
        host.ipmi_power_w("sdr", "PS1 Input | 160 Watts | ok\nPwr Consumption | no reading | ns")
    with pytest.raises(SourceError, match="2 sensors with different values"):
        host.ipmi_power_w("sdr", "Total_Power | 336 Watts | ok\nPwr Consumption | 300 Watts | ok")


def test_an_implausible_reading_of_the_controller_is_replaced_by_its_sensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ipmitool"
    dcmi, sdr = "Instantaneous power reading: 0 Watts", "Pwr Consumption | 336 Watts | ok"
    tool.write_text(f"#!/bin/sh\n[ $1 = dcmi ] && echo '{dcmi}' || echo '{sdr}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sampler, ends = host.HostSampler(power=True), time.monotonic() + 30
    while (power_w := sampler.sample(time.monotonic()).power_w) is None and time.monotonic() < ends:
        time.sleep(0.05)
    assert power_w == 336


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
    text = (
        "index, name, uuid, pci.bus_id, driver_version, power.limit [W], utilization.gpu [%], memory.used [MiB], "
        "memory.total [MiB], power.draw [W], temperature.gpu, clocks.current.sm [MHz], clocks.current.memory [MHz], "
        "ecc.errors.uncorrected.volatile.total\n"
        "0, NVIDIA A100-SXM4-40GB, GPU-1, 00000000:07:00.0, 550.54.15, 400.00 W, 0 %, 15 MiB, 40536 MiB, 57.30 W, 31, "
        "210 MHz, 1215 MHz, [N/A]\n"
    )
    (device,) = forms.parse_output(text, tool_of("nvidia").forms[0])
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
