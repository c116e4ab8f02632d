"""What is on a machine is found from evidence, quickly, and without a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.cli.machine import detect_devices
from accelmark.cli.runs import plan_request
from accelmark.compat.flagperf.monitor import MonitorScript
from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, folders, load_vendor
from accelmark.spec.runfile import RunSpec
from accelmark.telemetry.forms import Detect, ScriptRule, telemetry_of
from accelmark.telemetry.inventory import default_vendor, detect, evidence_of
from accelmark.telemetry.sources import ToolSource
from tests.telemetry.recorder import FLAGPERF_SCRIPT, SRC, make_vendor

ALL = (
    "amd", "ascend", "cambricon", "cpu", "hexaflake", "hygon", "iluvatar", "intel", "kunlunxin", "metax", "mthreads",
    "nvidia", "tsingmicro", "zixiao",
)  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_every_vendor_has_all_that_a_vendor_needs(name: str) -> None:
    spec, folder = load_vendor(name), folders("vendors")[name]
    telemetry_of(spec, name)
    assert (folder.path / "README.md").read_text().startswith("# ")
    for image in folder.path.glob("images/*"):
        assert (image / "Dockerfile").is_file()
    for chip in spec.chips:
        assert chip.source
        plain = chip.device_name.replace("(NVIDIA )?", "NVIDIA ").replace("\\", "")
        assert len([other for other in spec.chips if other.matches(plain, 40.0)]) <= 1, plain
    names = [(chip.name, chip.variant) for chip in spec.chips]
    assert len(set(names)) == len(names)


def test_devices_are_found_by_their_files_and_by_pci(tmp_path: Path) -> None:
    rule = Detect(device_files=("davinci[0-9]*",), pci=("0x19e5:0x1200",))
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
    assert default_vendor() in ALL


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
    recorded = Path(__file__).parent / "recorded"
    for vendor, file, leader in (
        ("iluvatar", "ixsmi-4.3.8.txt", {0: 1, 1: None}),
        ("ascend", "npu-smi-26.0.rc2.txt", {0: None, 1: 0}),
    ):
        tool = telemetry_of(load_vendor(vendor), vendor).tool
        assert tool is not None
        source = ToolSource(tool.model_copy(update={"command": ("cat", str(recorded / vendor / file))}))
        assert {info.index: info.power_in for info in source.open()} == leader
        assert source.sample()[0].memory_used_mib


def test_a_flagperf_monitor_script_is_a_source_as_it_is(tmp_path: Path) -> None:
    script, pid_file = tmp_path / "acme_monitor.py", tmp_path / "pid"
    script.write_text(FLAGPERF_SCRIPT.format(pid_file=str(pid_file), pace_s=0.2))
    source = MonitorScript(script, tmp_path, ScriptRule(file="acme_monitor.py"))
    infos = source.open()
    try:
        assert [info.memory_total_mib for info in infos] == [32768, 32768]
        first, second = source.sample()
        assert (first.temperature_c, first.power_w, first.memory_used_mib, first.utilisation) == (40, 114, 28653, 0.94)
        assert second.power_w == 74
        assert source.sample()[0].power_w == 114
    finally:
        source.close()
    assert not pid_file.exists()
