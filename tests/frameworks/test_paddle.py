"""Training in Paddle, with real ranks in an environment of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.frameworks.paddle.launch import device_support, launch
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.plugins.framework import HostPlace
from tests.cases.flops import published_flops
from tests.cases.test_full_size import PARAMETERS
from tests.frameworks.environments import SOURCE, framework_environment, framework_python, run_accelmark
from tests.frameworks.rank_jobs import SMALL_LLAMA as SMALL_PLAYS
from tests.frameworks.rank_jobs import rank_job, stop_job, write_plays

SMALL_LLAMA = {
    "batch_size": 8, "gradient_accumulation_steps": 1, "end.max_steps": 12, "log_every_steps": 4, "eval_batch_size": 4,
    "precision": "fp32", "parallelism": "ddp", "activation_checkpointing": "off", "threads": 1,
    "checkpoint.every_steps": 6, "checkpoint.keep": 3, "optimizer.lr": 0.003, "schedule.warmup_steps": 2,
    "model.vocab_size": 100, "model.hidden_size": 16, "model.intermediate_size": 32, "model.num_layers": 2,
    "model.num_heads": 4, "model.num_kv_heads": 2, "model.seq_length": 16,
}  # fmt: skip
SMALL_BERT = {
    "batch_size": 2, "end.max_samples": 12, "evaluate.every_steps": 6, "log_every_steps": 3, "eval_batch_size": 2,
    "precision": "fp32", "checkpoint.every_steps": 3, "checkpoint.keep": 2, "threads": 1, "loader.num_workers": 2,
    "activation_checkpointing": "full", "gradient_accumulation_steps": 1,
    "model.hidden_size": 16, "model.intermediate_size": 32, "model.num_layers": 2, "model.num_heads": 2,
    "model.vocab_size": 200, "model.seq_length": 16, "model.max_positions": 16, "model.max_predictions": 3,
    "model.from_checkpoint": "false",
}  # fmt: skip
COUNTED = """
import importlib, json, sys
import paddle
from accelmark.frameworks.paddle.counting import count_flops
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings

def case_of(name, **model):
    settings = load_case(name).train.settings
    settings = {**settings, "loader": {"synthetic": True}, "model": {**settings["model"], **model}}
    return importlib.import_module(f"accelmark.cases.{name}.paddle").Case(
        TrainSettings.model_validate(settings), {}, RankPlace())

found = {}
for name, small in json.loads(sys.argv[1]).items():
    with paddle.LazyGuard():
        model = case_of(name).build_model()
    parameters = sum(parameter.size for parameter in model.parameters() if not parameter.stop_gradient)
    case = case_of(name, **small)
    model = case.build_model()
    batch = {key: paddle.to_tensor(value) for key, value in case.synthetic_batch(2).items()}
    found[name] = parameters, count_flops(model, lambda: case.loss(model, batch)) / 2, case_of(name).flops_per_sample()
print(json.dumps(found))
"""
SMALL: dict[str, dict[str, int]] = {
    "bert": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "vocab_size": 300,
             "seq_length": 32, "max_positions": 32, "max_predictions": 5},
    "gpt3_6_7b": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "vocab_size": 300,
                  "seq_length": 32},
    "llama2_7b": {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
                  "vocab_size": 300, "seq_length": 32},
    "llama_mini": {"num_layers": 2, "seq_length": 32},
    "resnet_mini": {"width": 4},
}  # fmt: skip
OPTIMIZED = """
import json, sys
import numpy as np, paddle
from accelmark.frameworks.paddle.optimizers import build_optimizer
from accelmark.spec.settings.training import OptimizerSettings

settings, clip = json.loads(sys.argv[1])
model = paddle.nn.Linear(4, 3)
model.weight.set_value(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
model.bias.set_value(np.linspace(0.5, 1, 3, dtype=np.float32))
optimizer = build_optimizer(model, OptimizerSettings.model_validate(settings), clip)
x = paddle.to_tensor(np.linspace(-2, 3, 8, dtype=np.float32).reshape(2, 4))
for _ in range(5):
    (model(x) ** 2).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
print(json.dumps([model.weight.numpy().tolist(), model.bias.numpy().tolist()]))
"""
MEMORY = """
import paddle
from accelmark.frameworks.paddle.platform import is_out_of_memory
try:
    paddle.ones([1 << 44])
except Exception as error:
    print(is_out_of_memory(error))
"""


def host_place(num_ranks: int, interface: str | None = None) -> HostPlace:
    return HostPlace(
        nnodes=1, nproc=num_ranks, num_ranks=num_ranks, noderank=0, master_address="10.0.0.1", master_port=29500,
        local_address=None, interface=interface, servers=(), python="python3", rank_command=["rank", "job.json"],
    )  # fmt: skip


def test_one_rank_starts_alone_and_several_by_the_process_launcher() -> None:
    alone, several = launch(host_place(1)), launch(host_place(2, "eth0"))
    assert list(alone.command) == ["rank", "job.json"]
    assert alone.environment["WORLD_SIZE"] == "1"
    assert list(several.command)[1:5] == ["-m", "accelmark.frameworks.process_launcher", "--nproc", "2"]
    assert list(several.command)[-3:] == ["--", "rank", "job.json"]
    assert several.environment == {"PADDLE_MASTER": "10.0.0.1:29500"}
    assert several.defaults["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_build_without_the_device_is_refused_with_the_package() -> None:
    support = device_support("gpu", "3.3.1")
    assert not support.works
    assert support.reason == "Paddle 3.3.1 is a build without gpu: install paddlepaddle-gpu"
    assert device_support("cpu", "3.3.1").works


def paddle_program(program: str, *arguments: str) -> str:
    command = [str(framework_python("paddle")), "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def accelmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    cache = framework_environment("paddle").parent / "cache"
    return run_accelmark(*arguments, ACCELMARK_CACHE=cache)


def train(key: str, data: Path, out: Path, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    done = accelmark("train", key, "--vendor", "cpu", "--data", str(data), "--open", *options, "--out", str(out))
    assert (out / "summary.json").is_file(), done.stdout + done.stderr
    return done


def events(run: Path, event: str, rank: int = 0) -> list[Any]:
    (log,) = run.glob(f"*/round1/*_noderank0/rank{rank}.out.log")
    lines = (line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("[PerfLog] "))
    records = (json.loads(line.removeprefix("[PerfLog] ")) for line in lines)
    return [record["value"] for record in records if record["event"] == event]


def losses(run: Path, rank: int = 0) -> list[float]:
    return [loss for window in events(run, "STEP_END", rank) for loss in window["losses"]]


def mean_losses(run: Path) -> list[float]:
    means: list[float] = np.mean([losses(run, 0), losses(run, 1)], axis=0).tolist()
    return means


def tokens(place: Path, low: int, high: int, **counts: int) -> Path:
    """Write shards of random tokens, one for each split."""
    for split, count in counts.items():
        (place / split).mkdir(parents=True)
        np.save(place / split / "tokens.npy", np.random.default_rng(count).integers(low, high, count, dtype=np.uint16))
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens(tmp_path_factory.mktemp("tokens"), 0, 100, train=4000, val=400)


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("paddle") / "two"
    done = train("llama2_7b:paddle:CPU:1:2", text, out, SMALL_LLAMA)
    assert events(out, "FINISHED")[0]["state"] == "completed", done.stdout + done.stderr
    return out


@pytest.mark.heavy
def test_two_ranks_train_as_one_with_the_same_global_batch(two_ranks: Path, text: Path, tmp_path: Path) -> None:
    train("llama2_7b:paddle:CPU:1:1", text, tmp_path / "one", {**SMALL_LLAMA, "batch_size": 16})
    together = mean_losses(two_ranks)
    assert len(together) == 12
    np.testing.assert_allclose(together, losses(tmp_path / "one"), rtol=2e-5)
    assert events(two_ranks, "INIT_END")[0]["library_versions"].keys() == {"python", "numpy"}
    metrics = [events(run, "FINISHED")[0]["final_metrics"]["eval_loss"] for run in (two_ranks, tmp_path / "one")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.heavy
def test_gradient_accumulation_with_recomputation_equals_a_larger_batch(
    two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    settings = {**SMALL_LLAMA, "batch_size": 4, "gradient_accumulation_steps": 2}
    settings["activation_checkpointing"] = "full"
    train("llama2_7b:paddle:CPU:1:2", text, tmp_path / "two", settings)
    np.testing.assert_allclose(mean_losses(tmp_path / "two"), mean_losses(two_ranks), rtol=2e-5)


@pytest.mark.heavy
def test_resumed_ranks_train_on_to_the_bit(two_ranks: Path, tmp_path: Path) -> None:
    (round_dir,) = two_ranks.glob("*/round1")
    job = json.loads((round_dir / "job.json").read_text(encoding="utf-8"))
    shutil.copytree(round_dir / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "step000000012")
    job |= {"resume": True, "checkpoint_dir": str(tmp_path / "checkpoints")}
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    python = str(framework_python("paddle"))
    command = [python, "-m", "accelmark.frameworks.process_launcher", "--nproc", "2", "--", python]
    command += ["-m", "accelmark.train.loop.rank", str(tmp_path / "job.json")]
    node_dir = tmp_path / "key" / "round1" / "localhost_noderank0"
    node_dir.mkdir(parents=True)
    variables = {"PYTHONPATH": str(SOURCE), "ACCELMARK_NODE_DIR": str(node_dir), "PADDLE_MASTER": "127.0.0.1:29613"}
    variables["OMP_NUM_THREADS"] = "1"
    subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=200, capture_output=True)
    for rank in (0, 1):
        assert losses(tmp_path, rank) == losses(two_ranks, rank)[8:], "8: the newest checkpoint, of a replay pair"
    last = "checkpoints/step000000012/state.npz"
    with np.load(round_dir / last) as straight, np.load(tmp_path / last) as resumed:
        assert sorted(straight) == sorted(resumed)
        assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.heavy
def test_final_weights_are_evaluated_again_and_steps_replayed(two_ranks: Path) -> None:
    done = accelmark("evaluate", str(two_ranks), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["num_replayed_steps"] > 0, found["findings"]) == (True, [])


@pytest.mark.heavy
def test_bert_with_dropout_and_recomputation_is_replayed(tmp_path: Path) -> None:
    tokens(tmp_path / "data", 104, 200, train=600, val=200)
    (tmp_path / "data" / "initial").mkdir()
    (tmp_path / "data" / "initial" / "model.safetensors").write_bytes(b"")
    out = tmp_path / "run"
    train("bert:paddle:CPU:1:1", tmp_path / "data", out, SMALL_BERT)
    assert len(losses(out)) == 6
    done = accelmark("evaluate", str(out), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["num_replayed_steps"] > 0, found["findings"]) == (True, [])


@pytest.mark.heavy
def test_parameters_at_full_size_and_counted_flops_are_the_published_ones() -> None:
    found = json.loads(paddle_program(COUNTED, json.dumps(SMALL)))
    for name, (parameters, counted, formula) in found.items():
        expected, source = PARAMETERS[name]
        assert parameters == expected, source
        train = load_case(name).train
        assert train is not None
        settings = train.settings["model"]
        assert counted == pytest.approx(published_flops(name, {**settings, **SMALL[name]}), rel=2e-3), name
        assert formula is None or formula == published_flops(name, settings)


@pytest.mark.heavy
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "adam", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "adamw", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "lamb", "lr": 0.05, "weight_decay": 0.1, "eps": 1e-6},
    ],
    ids=lambda settings: settings["name"] if isinstance(settings, dict) else None,
)
def test_optimizers_compute_what_pytorchs_compute(settings: dict[str, Any], clip: float | None) -> None:
    import torch

    from accelmark.frameworks.pytorch.optimizers import build_optimizer
    from accelmark.spec.settings.training import OptimizerSettings

    weight, bias = json.loads(paddle_program(OPTIMIZED, json.dumps([settings, clip])))
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 12).view(4, 3).T)
        model.bias.copy_(torch.linspace(0.5, 1, 3))
    optimizer = build_optimizer(model, OptimizerSettings.model_validate(settings), torch.device("cpu"))
    for _ in range(5):
        (model(torch.linspace(-2, 3, 8).view(2, 4)) ** 2).sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(weight, model.weight.detach().numpy().T, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(bias, model.bias.detach().numpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stopped_rank_ends_in_step_and_says_so(num_ranks: int, tmp_path: Path) -> None:
    over = {**SMALL_PLAYS, "end.max_steps": 100000, "log_every_steps": 5}
    job = rank_job("paddle", tmp_path / "j", "llama_mini", {"shakespeare": write_plays(tmp_path)}, over)
    assert '"end_reason": "cancelled"' in stop_job(job, num_ranks)


@pytest.mark.heavy
def test_exhausted_memory_is_recognized() -> None:
    assert paddle_program(MEMORY) == "True"
