"""Trainings by the command, to the verdict: damaged data is named, and the curve of --write-reference is stored."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from accelmark.cli.folders import new_folder
from accelmark.cli.main import app
from accelmark.results.store.loaded_run import load_round, load_run, load_summary
from accelmark.spec.plugins.case import REFERENCE_FILE, ReferenceLoss
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, load_case
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.test_learning import with_checkpoint
from tests.cli import test_main as main

Damage = Callable[[Path], object]
TWO_CLASSES: Mapping[str, Any] = {"model.image_size": 32, "model.num_classes": 2}
ONE_SECOND: Mapping[str, Any] = {"model.eval_seconds": 1.0}
WORDS: Mapping[str, Any] = {"model.vocab_size": 100}
FEW_STEPS = {"batch_size": 2, "eval_batch_size": 2, "threads": 1, "loader.num_workers": 1, "end.max_steps": 8}


def box_outside(root: Path) -> None:
    boxes = root / "coco/annotations/instances_train2017.json"
    content = json.loads(boxes.read_text(encoding="utf-8"))
    content["annotations"][1]["bbox"] = [50, 10, 30, 20]
    boxes.write_text(json.dumps(content), encoding="utf-8")


def one_class_less(root: Path) -> None:
    shutil.rmtree(root / "imagenet/train/n01443537")


def other_rate(root: Path) -> None:
    tiny_data.save_tone(root / "librispeech/train-clean-100/19/198/19-198-0003.wav", ["ONE"], rate=8000)


def other_column(root: Path) -> None:
    table = root / "sst2/SST-2/train.tsv"
    table.write_text(table.read_text(encoding="utf-8").replace("label", "lable", 1), encoding="utf-8")


def other_tokenizer(root: Path) -> None:
    texts = ["another model's words", "which are many more"]
    tiny_data.save_tokenizer(root / "distilbert/hf/tokenizer.json", texts, [f"<{number}>" for number in range(200)])


def train(case: str, data: Path, out: Path, settings: Mapping[str, Any], *more: str) -> tuple[int, str]:
    """Train as a person would; return the exit code and all output."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["train", case, "--vendor", "cpu", "--open", "--data", str(data), "--out", str(out), *sets, *more]
    done = main.accelmark(*command, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", COLUMNS="250")
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "writer", "over", "damage", "message"),
    [
        ("detr", tiny_data.coco, {"model.num_classes": 4}, box_outside, "train2017.json: annotation 2: the box"),
        ("mobilenetv2", tiny_data.imagenet, TWO_CLASSES, one_class_less, "train: expected 2 class folders"),
        ("wav2vec2", tiny_data.librispeech, ONE_SECOND, other_rate, "19-198-0003.wav: has 1 channels at 8,000 Hz"),
        ("distilbert", tiny_data.sst2, WORDS, other_column, "train.tsv:1: has no column 'label'"),
        (
            "distilbert",
            tiny_data.sst2,
            WORDS,
            other_tokenizer,
            "tokens, the model 100: is it another model's tokenizer?",
        ),
    ],
    ids=["box outside its picture", "missing class", "audio of another rate", "unknown column", "another tokenizer"],
)
def test_damaged_data_fails_the_run_by_name(
    tmp_path: Path,
    name: str,
    writer: Callable[[Path], Mapping[str, Path]],
    over: Mapping[str, Any],
    damage: Damage,
    message: str,
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    settings = {**SMALL[name], **over, **FEW_STEPS}
    case = case_of(name, settings)
    with_checkpoint(case, getattr(case, "weights", None), tiny_data.with_weights(writer(root), name, root))
    damage(root)
    code, output = train(name, root, tmp_path / "run", settings)
    assert code == 1, output
    assert message in output
    assert "Traceback" not in output
    (result,) = (tmp_path / "run").rglob("result.json")
    assert message in result.read_text(encoding="utf-8")
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.heavy
def test_a_truncated_jpeg_fails_the_run_or_is_replaced_and_marks_it(tmp_path: Path) -> None:
    short = {**FEW_STEPS, **TWO_CLASSES, **{f"model.stage{number}_blocks": 1 for number in (1, 2, 3, 4)}}
    short |= {"batch_size": 4, "end.max_epochs": 2, "evaluate.every_epochs": 1, "checkpoint.every_steps": 2}
    data = tiny_data.imagenet(tmp_path)["imagenet"]
    damaged, another = data / "train/n01440764/n01440764_5.JPEG", data / "train/n01443537/n01443537_2.JPEG"
    damaged.write_bytes(damaged.read_bytes()[:300])
    code, output = train("resnet50", data, tmp_path / "refused", short)
    assert (code, f"{damaged}: is not a readable image" in output) == (1, True), output
    code, output = train("resnet50", data, tmp_path / "tolerated", short, "--tolerate-bad-samples", "1")
    assert (code, "OPEN" in output) == (0, True), output
    (path,) = (tmp_path / "tolerated").rglob("result.json")
    text = path.read_text(encoding="utf-8")
    assert "bad_samples" in json.loads(text)["marks"]
    assert str(damaged) in text
    another.write_bytes(another.read_bytes()[:300])
    code, output = train("resnet50", data, tmp_path / "too_many", short, "--tolerate-bad-samples", "1")
    assert code == 1, output
    assert "2 training samples cannot be read; --tolerate-bad-samples allows 1" in output


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
