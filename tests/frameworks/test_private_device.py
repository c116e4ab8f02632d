"""A device that PyTorch itself does not have: cases train on it, so that no path assumes CUDA."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelmark.cli.folders import new_folder
from accelmark.cli.kit import kit_environment
from accelmark.spec.cluster import environment_python
from accelmark.spec.job import JobSpec, ReplayedPair
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from tests.train.jobs import Ran, command, environment, evaluating, make_job, node_dir_of, write_job

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # the extension compiles for half a minute of CPU time
SETTINGS: dict[str, Any] = {"end.max_steps": 14, "checkpoint.every_steps": 5, "model.samples": 64}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of plug-ins with the vendor ``testchip``, whose device is the kit's stand-in."""
    return new_folder("vendors", "testchip", tmp_path_factory.mktemp("plugins"), kit=True).parents[1]


@pytest.fixture(scope="module")
def python(plugins: Path) -> str:
    """Return a Python with the stand-in."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return environment_python(kit_environment(plugins / "vendors/testchip/kit"))


def run_on_device(python: str, job: JobSpec, directory: Path) -> Ran:
    job = job.model_copy(update={"device_type": "standin", "framework_module": "standin_device"})
    node_dir = node_dir_of(directory)
    done = subprocess.run(
        [python, *command(write_job(job, directory), 1)[1:]], env=environment(node_dir), capture_output=True,
        text=True, timeout=500, check=False,
    )  # fmt: skip
    return Ran(node_dir, done.returncode, done.stdout + done.stderr)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_case_trains_on_the_device_as_on_the_cpu(python: str, tmp_path: Path, precision: str, run_here: Any) -> None:
    settings = {**SETTINGS, "precision": precision}
    ran = run_on_device(python, make_job(tmp_path / "device", settings), tmp_path / "device")
    assert ran.exit_code == 0, ran.output + ran.log()
    (started,) = ran.values("INIT_END")
    assert (started["device_type"], started["device_name"]) == ("standin", "Stand-in X1")
    on_cpu = run_here(make_job(tmp_path / "cpu", settings))
    assert ran.losses() == pytest.approx(on_cpu.losses(), rel=1e-4 if precision == "fp32" else 0.05)
    steps = [step for window in ran.values("STEP_END") for step in window["step_ms"]]
    assert len(steps) == 14
    assert min(steps) > 0, "timed by events of the device"


def test_weights_of_the_device_are_evaluated_and_replayed(python: str, tmp_path: Path) -> None:
    job = make_job(tmp_path, SETTINGS)
    trained = run_on_device(python, job, tmp_path)
    assert trained.exit_code == 0, trained.output
    pair = ReplayedPair(start="step000000010", end="step000000014", first_step=11, num_steps=4)
    (tmp_path / "again").mkdir()
    checked = run_on_device(python, evaluating(job, weights=("step000000014",), replays=(pair,)), tmp_path / "again")
    assert checked.exit_code == 0, checked.output + checked.log()
    assert checked.values("EVALUATED")[0]["metrics"] == pytest.approx(trained.finished().final_metrics)
    assert checked.values("REPLAYED")[0]["losses"] == pytest.approx(trained.losses()[10:])


COPIES = """
import json
import torch
from standin_device import _device
from accelmark.frameworks.pytorch.batches import fetched_ahead, CopyStream, mover, pinned

device = torch.device("standin", 0)
data_set = torch.arange(8.0).to(device)
before = _device.stream_counts()
copies = CopyStream(device)
batches = ({"x": torch.full((4,), float(number)), "y": data_set[number : number + 1]} for number in range(5))
ahead = fetched_ahead(copies.send(map(pinned, batches), mover(device, channels_last=False)), 2)
values = [[batch["x"].cpu().tolist()[0], batch["y"].cpu().item()] for batch in copies.receive(ahead)]
ahead.close()
counts = {name: number - before[name] for name, number in _device.stream_counts().items()}
print(json.dumps({"values": values, "current": torch.accelerator.current_stream().stream_id, **counts}))
"""


def on_device(python: str, program: str, *arguments: str) -> Any:
    command = [python, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_batches_are_copied_on_a_stream_of_their_own_for_which_the_computing_one_waits(
    python: str,
) -> None:
    found = on_device(python, COPIES)
    assert found["values"] == [[number, number] for number in range(5)]
    assert (found["streams"], found["copies_on_other_streams"], found["copies"]) == (1, 5, 0)
    assert found["waits"] == 6, "the copying stream for the data set, the computing one for each batch"
    assert found["recorded"] == 10, "each tensor is kept until the computing stream has used it"
    assert found["current"] == 0


def test_a_shipped_case_runs_on_a_vendors_device_from_the_command_line(
    python: str, plugins: Path, tmp_path: Path
) -> None:
    file = plugins / "vendors/testchip/vendor.yaml"
    file.write_text(file.read_text().replace("peaks: {}", "peaks: {bf16: 1.0}"))
    arguments = ["train", "resnet_mini:pytorch:X1:1:1", "--vendor", "testchip", "--synthetic", "--open"]
    settings = ["--set", "end.max_steps=4", "--set", "end.max_epochs=null", "--set", "batch_size=8"]
    program = [python, "-c", "from accelmark.cli import main; main()", *arguments, *settings]
    done = subprocess.run(
        [*program, "--out", str(tmp_path / "run")], env={**os.environ, PLUGINS_VARIABLE: str(plugins)},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    result = json.loads((tmp_path / "run" / "resnet_mini-pytorch-X1x1x1" / "round1" / "result.json").read_text())
    assert result["state"] == "succeeded", done.stdout + done.stderr
    assert result["environment"]["started"]["device_type"] == "standin"
    assert result["figures"]["mfu"]["value"] > 0
    assert (tmp_path / "run" / "report.html").is_file()
