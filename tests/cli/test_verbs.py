"""Help and completion of all verbs; automl, monitor, vendors, doctor and cluster, as a person calls them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from accelmark.cli import completion
from accelmark.cli.automl import app as automl
from accelmark.cli.machine import preflight
from accelmark.cli.main import app
from accelmark.cli.options import examples
from accelmark.results.read.telemetry import read_samples
from accelmark.run.environments.create import FrameworkEnvironment, register
from accelmark.spec.errors import AccelmarkError, RequestError
from accelmark.telemetry.monitor import status
from tests.automl.images import tiny_dataset, tiny_network
from tests.cli.test_main import accelmark
from tests.docs.test_commands import parse
from tests.telemetry.recorder import SRC, num_lines, until


def _verbs(command: Any, name: str) -> dict[str, Any]:
    found = {name: command}
    for sub_name, sub in getattr(command, "commands", {}).items():
        found |= _verbs(sub, f"{name} {sub_name}".strip())
    return found


VERBS = _verbs(typer.main.get_command(app), "")


def _help(name: str) -> str:
    context = VERBS[name].make_context(f"accelmark {name}".strip(), [], resilient_parsing=True)
    return str(VERBS[name].get_help(context))


@pytest.mark.parametrize("name", VERBS)
def test_no_help_is_cut_off_or_shows_types_of_python(name: str) -> None:
    usage, _, rest = _help(name).partition("\n\n")
    for mark in ("...", " <", "{", "Path]"):
        assert mark not in rest, rest
    assert "{" not in usage


def test_every_verb_shows_examples_which_the_command_line_accepts() -> None:
    assert set(examples()) == {name for name, verb in VERBS.items() if not hasattr(verb, "commands")}
    for verb, lines in examples().items():
        assert "\n\nExamples:\n" + "\n".join(f"  {line}" for line in lines) in _help(verb)
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "accelmark"
            parse(words)


def test_names_of_suites_searches_data_sets_and_frameworks_are_completed() -> None:
    assert completion.suites("quicks") == ["quickstart"]
    assert completion.searches("fa") == ["fashion"]
    assert completion.frameworks("ja") == ["jax"]
    assert completion.datasets("fashion") == ["fashion_mnist"]
    assert completion.prepared("lamb") == ["lambada"]
    assert "mfu" in completion.explained("mf")


def test_bash_completes_names() -> None:
    line = ["accelmark", "infer", "resnet_mini", "--scenario", "si"]
    asked = {"_ACCELMARK_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(line) - 1)}
    program = "import sys; sys.argv = ['accelmark']; from accelmark.cli.main import main; main()"
    done = accelmark(code=program, **asked)
    assert done.stdout.split() == ["single_stream"]


def output_of(*words: str) -> str:
    outcome = CliRunner().invoke(automl, list(words), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def test_resnet50_is_counted_as_aiperf_publishes_it() -> None:
    counted = json.loads(output_of("count", "resnet50", "--mode", "aiperf-v1", "--json"))
    assert (counted["forward"], counted["backward"]) == (7_806_583_495, 15_246_874_820)
    assert "7,806,583,495" in output_of("count", "resnet50", "--mode", "aiperf-v1")


def test_a_dry_run_prints_the_request_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(tiny_network().to_json())
    config = {
        "network": "net.json",
        "dataset": tiny_dataset(tmp_path).model_dump(mode="json"),
        "schedule": {"concurrency": 1, "max_trials": 5},
        "training": {"batch_size": 64},
    }
    path = tmp_path / "search.yaml"
    path.write_text(json.dumps(config))
    dry = ("run", "-c", str(path), "--dry-run", "--runs", str(tmp_path / "runs"))
    assert re.search(r"^schedule\.max_trials +5$", output_of(*dry), re.MULTILINE)
    printed = json.loads(output_of(*dry, "--json"))
    assert printed["schedule"]["max_trials"] == 5
    again = tmp_path / "edited.json"
    again.write_text(json.dumps(printed | {"schedule": printed["schedule"] | {"max_duration": 60}}))
    edited = json.loads(output_of("run", "-c", str(again), "--dry-run", "--json"))
    assert edited == printed | {"schedule": printed["schedule"] | {"max_duration": 60}}, "all keys can be read again"
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_the_values_of_a_configuration_whose_data_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    data, schedule = {"name": "cifar-10", "directory": "absent"}, {"concurrency": 1, "max_trials": 1}
    path.write_text(
        json.dumps({"network": "small32", "dataset": data, "schedule": schedule, "training": {"batch_size": 64}})
    )
    done = CliRunner().invoke(automl, ["run", "-c", str(path), "--dry-run"])
    assert isinstance(done.exception, AccelmarkError)
    assert re.search(r"^schedule\.concurrency +\d", done.stdout, re.MULTILINE)
    printed = json.loads(output_of("run", "-c", str(path), "--dry-run", "--json"))
    assert printed["network"] == "small32", "JSON is for another machine, whose data this one need not have"


@pytest.mark.parametrize(
    "arguments", [["run", "-c", "fashion"], ["run", "-c", "fashion", "--dry-run"], ["resume", "x"]]
)
def test_without_the_packages_of_automl_the_command_names_the_extra(arguments: list[str]) -> None:
    program = (
        "import importlib.metadata as metadata, sys\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name in ('optuna', 'ray'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "sys.modules['optuna'] = sys.modules['ray'] = None\n"
        "from accelmark.cli import main\n"
        "main()\n"
    )
    done = accelmark("automl", *arguments, code=program)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'accelmark[automl]'" in done.stderr


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"PYTHONPATH": str(SRC)})


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
