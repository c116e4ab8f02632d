"""Damaged data by the command, to the verdict: file and line are named; a truncated JPEG in the middle of an epoch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.test_learning import with_checkpoint

Damage = Callable[[Path], object]
TWO_CLASSES: Mapping[str, Any] = {"model.image_size": 32, "model.num_classes": 2}
ONE_SECOND: Mapping[str, Any] = {"model.eval_seconds": 1.0}
WORDS: Mapping[str, Any] = {"model.vocab_size": 100}
FEW_STEPS = {"batch_size": 2, "eval_batch_size": 2, "threads": 1, "loader.num_workers": 1, "end.max_steps": 8}


def boxes_file(root: Path) -> Path:
    return root / "coco/annotations/instances_train2017.json"


def box_outside(root: Path) -> None:
    content = json.loads(boxes_file(root).read_text(encoding="utf-8"))
    content["annotations"][1]["bbox"] = [50, 10, 30, 20]
    boxes_file(root).write_text(json.dumps(content), encoding="utf-8")


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
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["train", name, "--vendor", "cpu", "--open", "--data", str(root), "--out", str(tmp_path / "run"), *sets]
    done = subprocess.run(
        [sys.executable, "-m", "accelmark", *command],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "250"},
    )
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, output
    assert message in output
    assert "Traceback" not in output
    (result,) = (tmp_path / "run").rglob("result.json")
    assert message in result.read_text(encoding="utf-8")
    assert (tmp_path / "run" / "report.html").is_file()


SHORT = (
    "model.image_size=32 model.num_classes=2 model.stage1_blocks=1 model.stage2_blocks=1 model.stage3_blocks=1"
    " model.stage4_blocks=1 batch_size=4 eval_batch_size=3 end.max_epochs=2 end.max_steps=8 evaluate.every_epochs=1"
    " checkpoint.every_steps=2 loader.num_workers=1 threads=1"
)


def train(data: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    sets = [part for setting in SHORT.split() for part in ("--set", setting)]
    command = ["train", "resnet50", "--vendor", "cpu", "--open", "--data", str(data), "--out", str(out)]
    return subprocess.run(
        [sys.executable, "-m", "accelmark", *command, *sets, *options],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"},
    )


@pytest.mark.heavy
def test_a_truncated_jpeg_fails_the_run_or_is_replaced_and_marks_it(tmp_path: Path) -> None:
    data = tiny_data.imagenet(tmp_path)["imagenet"]
    damaged = data / "train" / "n01440764" / "n01440764_5.JPEG"
    damaged.write_bytes(damaged.read_bytes()[:300])
    refused = train(data, tmp_path / "refused")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert f"{damaged}: is not a readable image" in refused.stdout + refused.stderr
    tolerated = train(data, tmp_path / "tolerated", "--tolerate-bad-samples", "1")
    assert tolerated.returncode == 0, tolerated.stdout + tolerated.stderr
    (path,) = (tmp_path / "tolerated").rglob("result.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert "bad_samples" in result["marks"]
    assert str(damaged) in path.read_text(encoding="utf-8")
    assert "OPEN" in tolerated.stdout
    another = data / "train" / "n01443537" / "n01443537_2.JPEG"
    another.write_bytes(another.read_bytes()[:300])
    too_many = train(data, tmp_path / "too_many", "--tolerate-bad-samples", "1")
    assert too_many.returncode == 1, too_many.stdout + too_many.stderr
    output = too_many.stdout + too_many.stderr
    assert "2 training samples cannot be read; --tolerate-bad-samples allows 1" in output
    assert f"{damaged}: is not a readable image" in output or f"{another}: is not a readable image" in output
