"""``monitor``, ``vendors`` and ``doctor``, as a person calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from accelmark.cli.machine import doctor, monitor, preflight, vendors
from accelmark.cli.options import Verb
from accelmark.cli.runs import cluster
from accelmark.results.read.telemetry import read_samples
from accelmark.run.environments.create import FrameworkEnvironment, register
from accelmark.spec.errors import RequestError
from accelmark.telemetry.monitor import status
from tests.telemetry.recorder import SRC, num_lines, until

APP = typer.Typer(pretty_exceptions_enable=False)
for verb in (monitor, vendors, doctor, cluster):
    APP.command(cls=Verb)(verb)


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, list(arguments), env={"PYTHONPATH": str(SRC)})


def test_both_runs_of_a_cluster_are_shown_before_they_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: here\nlauncher: local\n")
    out = tmp_path / "out"
    shown = _call("cluster", str(file), "--steps", "40", "--out", str(out), "--dry-run", "--json")
    assert shown.exit_code == 0, shown.output
    runs = {Path(run["directory"]).name: run["plan"]["jobs"] for run in map(json.loads, shown.stdout.splitlines())}
    assert {name: len(jobs) for name, jobs in runs.items()} == {"scaling": 1, "recovery": 1}
    assert runs["recovery"][0]["job"]["work"]["settings"]["end"]["max_steps"] == 40
    assert not out.exists()


def test_a_monitor_is_started_seen_restarted_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    logs = str(tmp_path / "logs")
    try:
        assert (
            "running as process" in _call("monitor", "start", "--vendor", "cpu", "-l", logs, "--interval", "0.1").output
        )
        first = json.loads(_call("monitor", "-o", "status", "--log", logs, "--json").output)
        assert (first["running"], first["vendor"]) == (True, "cpu")
        assert isinstance(_call("monitor", "start", "--vendor", "cpu", "-l", logs).exception, RequestError)
        second = json.loads(_call("monitor", "restart", "--vendor", "cpu", "-l", logs, "--json").output)
        assert second["running"]
        assert second["pid"] != first["pid"]
    finally:
        assert "stopped" in _call("monitor", "stop", "-l", logs).output
    assert not status(tmp_path / "logs").running
    assert read_samples(tmp_path / "logs" / "telemetry.jsonl").footer is not None
    assert (tmp_path / "logs" / "cpu_monitor.log").is_file()
    (earlier,) = (tmp_path / "logs").glob("telemetry-*Z.jsonl")
    assert earlier.read_text().count('{"t"') >= first["samples"]
    assert "no monitor is running" in _call("monitor", "stop", "-l", logs).output
    assert "not running" in _call("monitor", "status", "-l", logs).output


def test_a_monitor_outlives_the_command_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    program = (
        "import sys\nfrom pathlib import Path\nfrom accelmark.telemetry.monitor import start\n"
        "start('cpu', Path(sys.argv[1]), 0.1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    try:
        before = num_lines(tmp_path)
        until(lambda: num_lines(tmp_path) > before + 2)
    finally:
        assert "stopped" in _call("monitor", "stop", "-l", str(tmp_path)).output


def test_vendors_lists_all_chips_and_those_of_this_machine() -> None:
    rows = {row["name"]: row for row in json.loads(_call("vendors", "--json").output)}
    assert rows["cpu"]["here"]
    assert rows["cpu"]["hardware"] == "CPU"
    assert "H100" in rows["nvidia"]["chips"]
    assert rows["nvidia"]["read_by"] == ["library", "nvidia-smi"]
    assert "nvidia" in _call("vendors").output


def test_doctor_reports_what_would_run_and_why_not() -> None:
    seen = json.loads(_call("doctor", "--json").output)
    support = {entry["what"]: entry for entry in seen["support"]}
    assert support["pytorch on cpu (cpu)"]["works"]
    assert "probe" in support["MFU on cpu"]["why"]
    assert seen["machine"]["cpu"]["model"]
    text = _call("doctor").output
    for heading in ("Devices", "Frameworks", "Engines", "What can run"):
        assert heading in text


def test_doctor_says_that_a_framework_runs_in_its_environment_while_that_has_a_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "mindspore"
    register(FrameworkEnvironment(framework="mindspore", path=place, created_at="2026-01-01T00:00:00Z", versions={}))

    def found() -> dict[str, object]:
        support = json.loads(_call("doctor", "--json").output)["support"]
        return next(each for each in support if each["what"] == "mindspore on cpu (cpu)")

    assert not found()["works"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    assert found() == {"what": "mindspore on cpu (cpu)", "works": True, "why": f"in the environment {place}"}


def test_preflight_of_this_machine_takes_its_own_vendor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "local.yaml"
    file.write_text("launcher: local\nmin_disk_mib: 0\n")
    preflight(file).show()
    shown = capsys.readouterr()
    assert shown.out == "1 of 1 hosts are ready\n"
    assert "devices were not checked" not in shown.err
