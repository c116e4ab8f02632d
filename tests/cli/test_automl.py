"""``accelmark automl``: counting, checking a request, and its messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.automl import app
from accelmark.spec.errors import AccelmarkError
from tests.automl.images import tiny_dataset, tiny_network
from tests.cli.test_main import accelmark


def output_of(*words: str) -> str:
    outcome = CliRunner().invoke(app, list(words), catch_exceptions=False)
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
    done = CliRunner().invoke(app, ["run", "-c", str(path), "--dry-run"])
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
