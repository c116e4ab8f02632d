"""A vendor's folder with a stand-in accelerator: it is made, checked with planted faults, and refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.checks import vendor_checks
from accelmark.cli.folders import new_folder
from accelmark.cli.kit import FAULTS, check_kit, kit_environment
from accelmark.cli.main import app
from accelmark.spec.cluster import environment_python
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE

HEALTHY = '"W": 1.0'
COMPUTES = """
import torch, standin_device
images = torch.randn(4, 3, 8, 8)
on_device = images.to("standin")
norms = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to("standin")
assert torch.equal(norms[0](images), norms[1](on_device).cpu())
assert torch.equal(norms[0].running_mean, norms[1].running_mean.cpu())
assert torch.equal(images.bfloat16().mean((2, 3)), on_device.bfloat16().mean((2, 3)).cpu())
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    return tmp_path


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, RequestError), result.output
    return str(result.exception)


def test_a_folder_with_a_kit_is_complete_and_names_the_stand_in(bench: Path) -> None:
    result = CliRunner().invoke(app, ["new", "vendor", "kit1", "--kit", "--into", str(bench)])
    assert result.exit_code == EXIT_OK
    assert "accelmark check vendor kit1 --kit" in result.output
    folder = bench / "vendors" / "kit1"
    for file in ("telemetry.py", "kit/setup.py", "kit/standin_device/__init__.py"):
        compile((folder / file).read_text(), file, "exec")
    assert (folder / "kit/standin_device/device.cpp").is_file()
    assert (folder / "cases/resnet_mini-pytorch/extern/__init__.py").is_file(), "the adaptation is there, too"
    checks = list(vendor_checks("kit1"))
    assert [check.what for check in checks if check.state == "missing"] == []
    assert "pytorch device 'standin'" in checks[0].what


def test_a_kit_is_refused_where_it_has_no_meaning(bench: Path) -> None:
    assert "is for the folder of a vendor" in refused("new", "case", "kit2", "--kit", "--into", str(bench))
    for words in (("case", "resnet_mini"), ("vendor", "cpu", "--no-run"), ("vendor", "cpu", "--set", "threads=1")):
        assert "--kit is for a vendor, without other options" in refused("check", *words, "--kit")
    assert "has no kit/: 'accelmark new vendor NAME --kit'" in refused("check", "vendor", "cpu", "--kit")
    assert "--environment is for --kit" in refused("check", "vendor", "cpu", "--environment", str(bench))
    new_folder("vendors", "kit2", bench, kit=True)
    where = str(bench / "nowhere")
    assert f"{where}/bin/python: No such file" in refused("check", "vendor", "kit2", "--kit", "--environment", where)


def test_a_stand_in_that_cannot_be_compiled_is_reported(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = new_folder("vendors", "kit5", bench, kit=True) / "kit/standin_device/device.cpp"
    source.write_text("int broken = ;\n")
    with pytest.raises(RequestError, match=r"the stand-in cannot be built: .*device\.cpp:1:14: error"):
        next(check_kit("kit5"))
    assert not any((bench / "state/kits").iterdir()), "nothing is left of it"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RequestError, match=r"'no-such-compiler' is not installed: install g\+\+"):
        next(check_kit("kit5"))


@pytest.mark.heavy
def test_each_planted_fault_has_a_row_and_a_monitor_in_milliwatts_does_not_survive(bench: Path) -> None:
    folder = new_folder("vendors", "kit6", bench, kit=True)
    result = CliRunner().invoke(app, ["check", "vendor", "kit6", "--kit", "--json"])
    python = environment_python(kit_environment(folder / "kit"))  # as it was built
    subprocess.run([python, "-c", COMPUTES], env=os.environ | {"STANDIN_DRIVER": str(bench)}, check=True)
    rows = {row["fault"]: row for row in json.loads(result.stdout)}
    assert list(rows) == [fault.name for fault in FAULTS]
    assert [(row["fault"], row["reported"]) for row in rows.values() if not row["survived"]] == []
    assert result.exit_code == EXIT_OK
    for fault, said in {
        "no fault": "mean power ",
        "hung device": "timed_out: rank 0 wrote no event for 30 s",
        "lost device": "standin:0 does not answer: the device was lost",
        "too little memory": "rank 0: out of memory on standin:0",
        "power in milliwatts": "mean power ",
        "slow rank": "rank 1 on localhost costs the others",
    }.items():
        assert said in rows[fault]["reported"]

    monitor = folder / "telemetry.py"
    assert HEALTHY in monitor.read_text()
    monitor.write_text(monitor.read_text().replace(HEALTHY, '"W": 1000.0'))
    outcome = next(check_kit("kit6"))
    assert (outcome.fault, outcome.survived) == ("no fault", False)
    assert "device 0: power_w is out of bounds (0 to 5000 W). Check its unit." in outcome.reported


def test_the_table_shows_what_did_not_survive(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder("vendors", "kit7", bench, kit=True)
    monkeypatch.setattr("accelmark.cli.kit.kit_environment", lambda *_: Path(sys.prefix))
    monkeypatch.setattr("accelmark.cli.kit.run_accelmark", lambda *_: (1, "", "the host is not ready"))
    result = CliRunner().invoke(app, ["check", "vendor", "kit7", "--kit"], env={"COLUMNS": "160"})
    assert result.exit_code == EXIT_FAILED
    assert "6 of 6: slow rank: not survived" in result.output
    table = [line for line in result.output.splitlines() if line.startswith("slow rank ")]
    assert "the host is not ready (expected: the training succeeds; rank 1 is named)" in " ".join(table[-1].split())
