"""The loss curve that `--write-reference` stores, and `resume` of a run whose evaluation of weights was stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from accelmark.cli.folders import new_folder
from accelmark.cli.main import app
from accelmark.results.store.loaded_run import load_round, load_run, load_summary
from accelmark.spec.plugins.case import REFERENCE_FILE, ReferenceLoss
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, load_case

TRAIN = ("train", "waves", "--vendor", "cpu")


def accelmark(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A case without a target, whose loss curve is its only criterion."""
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    folder = new_folder("cases", "waves", tmp_path)
    values = yaml.safe_load((folder / "case.yaml").read_text())
    values["train"]["target"] = None
    (folder / "case.yaml").write_text(yaml.safe_dump(values))
    return folder


def findings(run: Path) -> list[tuple[str, str]]:
    (path,) = run.glob("*/round1/result.json")
    return [(each.severity, each.actual) for each in load_round(path).findings if each.rule == "reference-loss"]


@pytest.mark.heavy
def test_a_curve_is_measured_once_and_judges_later_runs(folder: Path, tmp_path: Path) -> None:
    assert "speed only" in accelmark("cases").output
    done = accelmark(*TRAIN, "--write-reference", "--out", str(tmp_path / "first"))
    assert "reference loss: " in done.output, done.output
    found = ReferenceLoss.model_validate(yaml.safe_load((folder / REFERENCE_FILE).read_text()))
    assert (len(found.steps), found.steps[0], found.samples_per_step) == (100, 1, 32)
    assert found.settings["optimizer.lr"] == 0.5
    assert "run first, " in found.source
    ((severity, actual),) = findings(tmp_path / "first")
    assert (severity, actual.partition(":")[0]) == ("info", "no reference yet")
    train = load_case("waves").train
    assert train is not None
    assert train.reference_loss == found
    assert "loss curve within 2\u202f%" in " ".join(accelmark("cases").output.split(" "))

    again = accelmark(*TRAIN, "--out", str(tmp_path / "same"))
    assert "waves: round 1: mean relative error " in again.output
    ((severity, actual),) = findings(tmp_path / "same")
    assert severity == "info"
    assert re.match(r"mean relative error (0|<\s0\.001|0\.00\d+)\s% against", actual), actual
    assert load_summary(tmp_path / "same" / "summary.json").cases[0].converged
    accelmark(*TRAIN, "--open", "--set", "batch_size=16", "--out", str(tmp_path / "smaller"))
    assert findings(tmp_path / "smaller") == [("warning", "16: losses were not compared")]
    assert load_summary(tmp_path / "smaller" / "summary.json").cases[0].converged is None
    assert accelmark("verify", str(tmp_path / "first")).exit_code in (0, 1)
    assert "reference_loss was changed" not in (tmp_path / "first" / "summary.json").read_text()


COMMAND = (sys.executable, "-c", "from accelmark.cli import main; main()")


def reasons(run: Path) -> list[str]:
    (case,) = load_run(run).summary.cases
    return [each.actual for each in case.findings if each.rule == "reevaluation"]


@pytest.mark.heavy
def test_an_interrupted_evaluation_is_repeated_by_resume(tmp_path: Path) -> None:
    new_folder("cases", "waves", tmp_path)
    run, here = tmp_path / "run", {**os.environ, PLUGINS_VARIABLE: str(tmp_path)}
    train = (*COMMAND, "train", "waves", "--vendor", "cpu", "--out", str(run))
    with subprocess.Popen(train, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit = time.monotonic() + 200
        while not list(run.glob("*/evaluation-round1/*/rank0.out.log")) and time.monotonic() < limit:
            assert process.poll() is None, "it ended before its weights were evaluated"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=200)
    assert f"accelmark resume {run}" in " ".join(shown.split()), shown
    assert reasons(run) == ["the evaluation job did not complete: was cancelled"]
    done = subprocess.run((*COMMAND, "resume", str(run)), env=here, capture_output=True, text=True, check=False)
    assert "evaluating its weights, which was interrupted" in done.stdout + done.stderr
    assert reasons(run) == [], done.stdout
