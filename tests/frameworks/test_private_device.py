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
from accelmark.spec.job import EvaluateJob, JobSpec, ReplayedPair, TrainJob
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from tests.train.jobs import Ran, command, environment, make_job, node_dir_of, write_job

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
    assert isinstance(job.work, TrainJob)
    pair = ReplayedPair(start="step000000010", end="step000000014", first_step=11, num_steps=4)
    work = EvaluateJob(train=job.work, weights=("step000000014",), replays=(pair,))
    (tmp_path / "again").mkdir()
    checked = run_on_device(python, job.model_copy(update={"work": work}), tmp_path / "again")
    assert checked.exit_code == 0, checked.output + checked.log()
    assert checked.values("EVALUATED")[0]["metrics"] == pytest.approx(trained.finished().final_metrics)
    assert checked.values("REPLAYED")[0]["losses"] == pytest.approx(trained.losses()[10:])


COPIES = """
import json
import torch
from standin_device import _device
from accelmark.frameworks.pytorch.batches import Ahead, CopyStream, mover, pinned

device = torch.device("standin", 0)
data_set = torch.arange(8.0).to(device)
before = _device.stream_counts()
copies = CopyStream(device)
batches = ({"x": torch.full((4,), float(number)), "y": data_set[number : number + 1]} for number in range(5))
ahead = Ahead(copies.send(map(pinned, batches), mover(device, channels_last=False)), 2)
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


RESUMED = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import standin_device, torch
from accelmark.frameworks.pytorch.case import Place
from accelmark.frameworks.pytorch.state import Training
from accelmark.frameworks.pytorch.optimizers import build_optimizer, build_schedule
from accelmark.frameworks.pytorch.training.checkpoint import Checkpoints
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import EndSettings, OptimizerSettings, ScheduleSettings, TrainSettings
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory
from accelmark.train.loop.contract import Progress

device = torch.device("standin", 0)
def checkpoints(settings, directory):
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = build_optimizer(model, settings.optimizer, device)
    training = Training(model, optimizer, build_schedule(optimizer, ScheduleSettings(), 1, 1), None, nullcontext)
    saved = CheckpointDirectory(directory, RankPlace(), lambda values: lambda: values)
    return training, Checkpoints(saved, settings, training, Place(0, 1, 1, device, 1), RankPlace())

def resume(name, fused):
    directory = Path(sys.argv[1], f"{name}-{fused}")
    optimizer = OptimizerSettings(name=name, lr=0.01, fused=fused)
    settings = TrainSettings(batch_size=4, end=EndSettings(max_steps=1), optimizer=optimizer)
    training, saved = checkpoints(settings, directory)
    training.model(torch.ones(4, 4).to(device)).sum().backward()
    training.optimizer.step()
    saved.save(Progress())
    resumed, loaded = checkpoints(settings, directory)
    loaded.load(loaded.newest())
    states = [list(each.optimizer.state.values()) for each in (training, resumed)]
    devices = [{name: value.device.type for name, value in state[0].items()} for state in states]
    same = all(torch.equal(a[name].cpu(), b[name].cpu()) for a, b in zip(*states) for name in a)
    return {"devices": devices, "same": same, "weights": resumed.model.weight.device.type}

print(json.dumps([resume(*each) for each in json.loads(sys.argv[2])]))
"""


def test_a_resumed_optimizer_has_its_state_on_the_device_and_its_step_counters_where_they_were(
    python: str, tmp_path: Path
) -> None:
    optimizers = [("adamw", False), ("lamb", None), ("adamw", True)]
    resumed = on_device(python, RESUMED, str(tmp_path), json.dumps(optimizers))
    for step, found in zip(("cpu", "cpu", "standin"), resumed, strict=True):
        before, after = found["devices"]
        assert before == after == {"step": step, "exp_avg": "standin", "exp_avg_sq": "standin"}
        assert found["same"]
        assert found["weights"] == "standin"


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
