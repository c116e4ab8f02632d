"""``accelmark init`` writes files that can be run, and refuses what no run could be made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.cli.runs import read_run_file
from accelmark.plan.request import Detected


def test_init_writes_the_number_of_ranks_and_the_vendor_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--vendor", "cpu", "--devices", "2", "--into", str(tmp_path)]
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 0
    request = read_run_file(tmp_path / "run.yaml")
    assert request.vendor == "cpu"
    assert [case.key for case in request.cases][:2] == ["resnet_mini:pytorch:CPU:1:1", "resnet_mini:pytorch:CPU:1:2"]
    monkeypatch.setattr("accelmark.cli.machine.detect_devices", lambda vendor: Detected("nvidia", "H100", None, 1))
    more = CliRunner().invoke(app, ["init", *arguments[2:], "--force"])
    assert "requests 2 devices a host, this one has 1" in str(more.exception)
