"""``accelmark automl``: counting, checking a request, and its messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from accelmark.automl.controller import session
from accelmark.automl.model.layers import Convolution, GlobalPool, Layer, Softmax
from accelmark.automl.model.network import INPUT, Network, Node
from accelmark.automl.model.seeds import small
from accelmark.cli.automl import app
from accelmark.spec.errors import AccelmarkError
from tests.automl.images import CLASSES, SIDE, tiny_dataset, tiny_network


def output_of(*words: str) -> str:
    outcome = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def test_resnet50_is_counted_as_aiperf_publishes_it() -> None:
    counted = json.loads(output_of("count", "resnet50", "--mode", "aiperf-v1", "--json"))
    assert (counted["forward"], counted["backward"]) == (7_806_583_495, 15_246_874_820)
    assert "7,806,583,495" in output_of("count", "resnet50", "--mode", "aiperf-v1")


def test_counting_loads_no_framework() -> None:
    program = (
        "import sys; from accelmark.cli.automl import app\n"
        "try: app(['count', 'resnet50'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def without_dense() -> Network:
    """Convolutions alone, the classes' scores pooled out of the last one."""
    layers: list[tuple[str, Layer]] = [
        ("first", Convolution(filters=4, kernel=3, padding=1)),
        ("second", Convolution(filters=CLASSES, kernel=3, padding=1)),
        ("pool", GlobalPool()),
        ("softmax", Softmax()),
    ]
    before = [INPUT, *(name for name, _ in layers)]
    nodes = tuple(Node(name=name, layer=layer, inputs=(before[index],)) for index, (name, layer) in enumerate(layers))
    return Network(name="pooled", input_shape=(1, SIDE, SIDE), classes=CLASSES, nodes=nodes)


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


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"network": "shapes.json"}, r"a window of 99x99 does not fit into 12x12"),
        ({"network": "classes.json"}, r"has classes 0 to 3, network 'tiny' has 7 classes"),
        ({"dataset": {"name": "arrays", "directory": "half.npz"}}, r"a split is missing: no held_out_images"),
        ({"dataset": {"name": "imagenet", "directory": "."}, "network": "resnet50"}, r"train: a split is missing"),
        ({"schedule": {"concurrency": 4096, "max_trials": 1}, "search": {"method": "genetic"}}, r"search.method"),
        ({"tuning": {"storage": "nowhere://x", "study": "a b"}}, r"tuning.study"),
        ({"rules": "aiperf"}, r"'aiperf-v1' or 'smoke', found 'aiperf'"),
        ({"training": {"batch_size": 257}}, r"training.batch_size: a batch of 257 is larger than .* 256 images"),
        ({"tuning": {"batch_size": [64, 512]}}, r"tuning.batch_size: a batch of 512 is larger than .* 256 images"),
        (
            {"network": "first.json"},
            r"tuning.kernel: network 'first' has no spatial convolution .* write tuning.kernel: \[\]",
        ),
        (
            {"network": "pooled.json", "tuning": {"dropout": [0.0, 0.5]}},
            r"tuning.dropout: network 'pooled' has neither dropout nor a dense layer .*: null",
        ),
        ({"search": {"initial_weights": "none.npz"}}, r"none.npz: cannot be read as weights: .*No such file"),
        ({"search": {"initial_weights": "other.npz"}}, r"other.npz: is not of network 'tiny': .*c1_conv"),
    ],
)
def test_a_wrong_request_is_one_message_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(session, "ray_workers", lambda *_, **__: pytest.fail("Ray was started"))
    (tmp_path / "net.json").write_text(tiny_network().to_json())
    whole = json.loads(tiny_network().to_json())
    (tmp_path / "classes.json").write_text(small((1, SIDE, SIDE), 7, filters=(4, 6), name="tiny").to_json())
    whole["nodes"][0]["layer"]["kernel"] = 99
    (tmp_path / "shapes.json").write_text(json.dumps(whole))
    (tmp_path / "first.json").write_text(small((1, SIDE, SIDE), CLASSES, filters=(4,), name="first").to_json())
    (tmp_path / "pooled.json").write_text(without_dense().to_json())
    np.savez(tmp_path / "other.npz", c1_conv=np.zeros((1, 1), np.float32))
    np.savez(tmp_path / "half.npz", train_images=np.zeros((2, 1, SIDE, SIDE)), train_labels=np.arange(2))
    request = {
        "network": "net.json",
        "dataset": tiny_dataset(tmp_path).model_dump(mode="json"),
        "schedule": {"concurrency": 1, "max_trials": 1},
        "training": {"batch_size": 64},
    }
    path = tmp_path / "search.json"
    path.write_text(json.dumps(request | broken))
    for dry in ((), ("--dry-run",)):
        with pytest.raises(AccelmarkError, match=message):
            output_of("run", "-c", str(path), "--runs", str(tmp_path / "runs"), *dry)
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
    done = subprocess.run(
        [sys.executable, "-c", program, "automl", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'accelmark[automl]'" in done.stderr
