"""JAX, MindSpore, PaddlePaddle and TensorFlow end to end, in the environments that ``accelmark env create`` makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import times_of_ranks
from accelmark.spec.plugins.catalog import FolderRef, load_framework, load_vendor
from accelmark.spec.settings.training import OptimizerSettings
from tests.cases.job_of import losses_of
from tests.cases.tiny_data import write_idx
from tests.frameworks.environments import framework_environment, run_accelmark, run_program
from tests.frameworks.rank_jobs import SMALL_LLAMA as SMALL
from tests.frameworks.rank_jobs import (
    Events,
    final_state,
    rank_command,
    rank_events,
    rank_job,
    run_job,
    stop_job,
    values,
    write_plays,
)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

LIBRARIES = {"jax": {"flax", "optax"}, "mindspore": {"python", "numpy"}, "paddle": {"numpy"}, "tensorflow": {"numpy"}}


def expect_capture(job: Path) -> None:
    """Where capture fails, MindSpore computes the right numbers slowly, and reports it only in its log."""
    assert "JitCompileWithTry" not in (job.parent / "rank0.out.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=list(LIBRARIES))
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plays(tmp_path_factory.mktemp("plays"))


@pytest.fixture(scope="module")
def one_rank(framework: str, plays: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events]:
    job = rank_job(framework, tmp_path_factory.mktemp("one") / "j", "llama_mini", {"shakespeare": plays}, SMALL)
    return job, run_job(job)


def test_a_rank_trains_evaluates_and_reports_what_the_audit_reads(
    framework: str, one_rank: tuple[Path, Events]
) -> None:
    job, events = one_rank
    expect_capture(job)
    (finished,) = values(events, "FINISHED")
    assert (finished["state"], finished["end_reason"], finished["global_steps"]) == ("completed", "max_steps", 6)
    assert len(losses_of(events)) == 6
    assert losses_of(events)[-1] < losses_of(events)[0]
    assert finished["final_metrics"].keys() == {"eval_loss", "bits_per_byte"}
    hidden, layers, length, vocabulary = 32, 2, 32, 256
    weights = layers * (4 * hidden**2 + 3 * hidden * 64) + hidden * vocabulary
    attention = 12 * layers * hidden * length
    assert finished["flops_per_sample_formula"] == length * (6 * weights + attention)
    (started,) = values(events, "INIT_END")
    assert started["num_parameters"] == weights + vocabulary * hidden + (2 * layers + 1) * hidden
    assert len(started["checkpoint_hash"]) == len(started["parameter_hash"]) == 64
    assert (started["optimizer_class"], started["compute_type"]) == ("AdamW", "float32")
    assert started["library_versions"].keys() >= LIBRARIES[framework]


def test_two_ranks_train_as_one_with_the_same_global_batch(
    framework: str, one_rank: tuple[Path, Events], plays: Path, tmp_path: Path
) -> None:
    job = rank_job(framework, tmp_path / "two", "llama_mini", {"shakespeare": plays}, {**SMALL, "batch_size": 4})
    events = run_job(job, num_ranks=2)
    assert values(events, "INIT_END")[0]["world_size"] == 2
    of_ranks = [losses_of(rank_events(job, rank)) for rank in range(2)]  # JAX's are of all, Paddle's each rank's own
    np.testing.assert_allclose(np.mean(of_ranks, axis=0), losses_of(one_rank[1]), rtol=2e-5)
    ours, theirs = final_state(job, 6), final_state(one_rank[0], 6)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=2e-4, err_msg=name)
    metrics = [values(found, "EVALUATE")[-1]["metrics"] for found in (events, one_rank[1])]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def test_a_resumed_job_continues_exactly(
    framework: str, one_rank: tuple[Path, Events], plays: Path, tmp_path: Path
) -> None:
    data, place = {"shakespeare": plays}, tmp_path / "resumed"
    over = {**SMALL, "schedule.name": "constant", "schedule.warmup_ratio": 0.0}
    whole = rank_job(framework, tmp_path / "whole", "llama_mini", data, over)
    expected = losses_of(run_job(whole))
    run_job(rank_job(framework, place, "llama_mini", data, {**over, "end.max_steps": 3}))
    again = rank_job(framework, place, "llama_mini", data, over, resume=True)
    events = run_job(again)
    assert values(events, "TRAIN_START")[0]["global_steps"] == 3
    assert losses_of(events) == expected[3:]
    ours, theirs = final_state(again, 6), final_state(whole, 6)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("precision", "compute_type"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precisions_learn_with_weights_in_fp32(
    framework: str, plays: Path, tmp_path: Path, precision: str, compute_type: str
) -> None:
    job = rank_job(framework, tmp_path / "j", "llama_mini", {"shakespeare": plays}, {**SMALL, "precision": precision})
    events = run_job(job)
    assert values(events, "FINISHED")[0]["state"] == "completed"
    on_cpu = "float32" if framework in ("mindspore", "paddle") else compute_type
    assert values(events, "INIT_END")[0]["compute_type"] == on_cpu
    assert losses_of(events)[-1] < losses_of(events)[0]
    weights = {name: array for name, array in final_state(job, 6).items() if "parameters" in name or "model" in name}
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_resnet_mini_counts_the_published_operations_and_resumes_its_statistics(framework: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for prefix, count in (("train", 64), ("t10k", 20)):
        images = random.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        write_idx(tmp_path, prefix, images, labels)
    over = {
        "batch_size": 16, "eval_batch_size": 7, "end.max_epochs": 1, "precision": "fp32", "threads": 1,
        "checkpoint.every_steps": 2, "log_every_steps": 2,
    }  # fmt: skip
    job = rank_job(framework, tmp_path / "j", "resnet_mini", {"fashion_mnist": tmp_path}, over)
    events = run_job(job)
    expect_capture(job)
    (finished,) = values(events, "FINISHED")
    assert (finished["num_parameters"], finished["flops_per_sample_formula"]) == (77_866, 15_343_360)
    assert values(events, "INIT_END")[0]["eval_samples"] == 20
    statistics = [array for name, array in final_state(job, 4).items() if "mean" in name]
    assert any(np.abs(array).max() > 0 for array in statistics)


def test_memory_that_does_not_suffice_is_named_with_what_to_do(framework: str, plays: Path, tmp_path: Path) -> None:
    over = {**SMALL, "model.intermediate_size": 1 << 29}
    events = run_job(rank_job(framework, tmp_path / "j", "llama_mini", {"shakespeare": plays}, over))
    (finished,) = values(events, "FINISHED")
    assert finished["end_reason"] == "out_of_memory", finished["message"]
    assert "try a smaller batch_size" in finished["message"]


def test_settings_that_the_framework_does_not_have_are_refused_at_planning(framework: str) -> None:
    for setting in ("parallelism=fsdp2", "compile=default", "precision=fp8"):
        done = run_accelmark("train", f"llama_mini:{framework}:CPU", "--vendor", "cpu", "--set", setting, "--dry-run")
        assert done.returncode == 2
        assert f"is refused by {framework}" in done.stderr


def test_a_run_with_two_ranks_is_followed_evaluated_again_and_verified(framework: str, tmp_path: Path) -> None:
    cluster = {"environments": {framework: str(framework_environment(framework))}, "vendor": "cpu"}
    case = {"key": f"llama_mini:{framework}:CPU:1:2", "settings": {**SMALL}}
    (tmp_path / "run.yaml").write_text(json.dumps({"open": True, "cluster": cluster, "cases": [case]}))
    run = tmp_path / "run"
    done = run_accelmark("run", str(tmp_path / "run.yaml"), "--out", str(run), timeout_s=400)
    (round_dir,) = run.glob("*/round1")
    result = json.loads((round_dir / "result.json").read_text())
    assert result["state"] == "succeeded", done.stdout + done.stderr
    assert [rank["state"] for rank in result["nodes"][0]["ranks"]] == ["succeeded", "succeeded"]
    assert (round_dir / "localhost_noderank0" / "telemetry.jsonl").stat().st_size > 0
    p50 = result["figures"]["step_p50_ms"]
    assert p50["reason"] if framework == "jax" else p50["value"] > 0
    assert result["figures"]["throughput_train"]["value"] > 0
    done = run_accelmark("evaluate", str(run), "--json", timeout_s=400)
    (found,) = json.loads(done.stdout)
    assert (found["num_replayed_steps"] > 0, found["findings"]) == (True, [])
    assert not list(Path.cwd().glob("rank_*")), "MindSpore's dumps belong to a job's directory"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stopped_rank_ends_in_step_and_says_so(framework: str, num_ranks: int, plays: Path, tmp_path: Path) -> None:
    over = {**SMALL, "end.max_steps": 100000, "log_every_steps": 5}
    job = rank_job(framework, tmp_path / "j", "llama_mini", {"shakespeare": plays}, over)
    assert '"end_reason": "cancelled"' in stop_job(job, num_ranks)


EXTERN = """
from accelmark.frameworks.{framework}.hooks import Hooks

class Extern(Hooks):
    def convert_model(self, model):
        print("converted")
        return super().convert_model(model)

    def create_optimizer(self, *model):
        self.settings = self.settings.model_copy(
            update={{"optimizer": self.settings.optimizer.model_copy(update={{"weight_decay": 0.0, "eps": 1.0}})}}
        )
        return super().create_optimizer(*model)

    def train_step(self, training, *inputs):
        print("steps")
        return super().train_step(training, *inputs)
"""
PLACES = {"convert_model": 5, "create_optimizer": 9, "train_step": 15}


def test_a_vendors_hooks_replace_the_frameworks_and_are_recorded(
    framework: str, one_rank: tuple[Path, Events], plays: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"llama_mini-{framework}"
    (folder / "extern").mkdir(parents=True)
    file = folder / "extern" / "__init__.py"
    file.write_text(EXTERN.format(framework=framework))
    extern = FolderRef(name=folder.name, path=folder, sha256="")
    place, data = tmp_path / "job", {"shakespeare": plays}
    events = run_job(job := rank_job(framework, place, "llama_mini", data, SMALL, extern=extern))
    (started,) = values(events, "INIT_END")
    assert started["hooks"] == {name: f"{file}:{line}" for name, line in PLACES.items()}
    log = (job.parent / "rank0.out.log").read_text()
    assert ("converted" in log, "steps" in log) == (True, True)
    assert values(events, "FINISHED")[0]["state"] == "completed"
    assert losses_of(events)[0] == pytest.approx(losses_of(one_rank[1])[0], rel=1e-6)
    assert losses_of(events)[-1] > losses_of(one_rank[1])[-1], "with eps=1, Adam moves less"
    file.write_text(EXTERN.format(framework=framework) + "    def model_to_fp16(self, model): ...\n")
    (place / "rank0.out.log").unlink()
    (refused,) = values(run_job(job), "FINISHED")
    assert refused["state"] == "failed"
    assert "Extern may replace convert_model, create_optimizer, train_step only" in refused["message"]


SLOW_CASE = """
from accelmark.cases.llama_mini.arrays import Case as Standard

class Case(Standard):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
"""
SLOW = {
    "jax": """
        import jax, jax.numpy as jnp
        try:
            rounds = jnp.where(jax.lax.axis_index("data") == 1, 12, 0)
        except NameError:  # not in a step of several ranks
            return loss
        begin = jnp.eye(512) * jax.lax.stop_gradient(loss)
        return loss + 0.0 * jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), begin).sum()
""",
    "mindspore": """
        if self.place.rank == 1:
            x = ops.eye(512, 512, ms.float32) * ops.stop_gradient(loss)
            for _ in range(240):
                x = ops.tanh(ops.matmul(x, x))
            loss = loss + 0.0 * x.sum()
        return loss

import mindspore as ms
from mindspore import ops
""",
    "tensorflow": """
        import tensorflow as tf
        x = tf.eye(512) * tf.stop_gradient(loss)
        for _ in range(12 if self.place.rank == 1 else 0):
            x = tf.tanh(x @ x)
        return loss + 0.0 * tf.reduce_sum(x)
""",
    "paddle": """
        import paddle
        x = paddle.eye(512) * loss.detach()
        for _ in range(12 if self.place.rank == 1 else 0):
            x = paddle.tanh(x @ x)
        return loss + 0.0 * x.sum()
""",
}
"""Cases whose rank 1 multiplies matrices besides."""


def test_a_rank_that_computes_longer_is_named(framework: str, plays: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / f"{framework}.py").write_text(SLOW_CASE + SLOW[framework])
    case = FolderRef(name="slow", path=folder, sha256="0" * 64)
    num_steps = 30 if framework == "mindspore" else 100
    settings = {**SMALL, "batch_size": 4, "end.max_steps": num_steps, "log_every_steps": 10}
    job = rank_job(framework, tmp_path / "two", "llama_mini", {"shakespeare": plays}, settings, case=case)
    events = run_job(job, num_ranks=2)
    assert values(events, "FINISHED")[0]["state"] == "completed", values(events, "FINISHED")
    node = NodeDir(job.parent, "n1", 0, None, None)
    timeline = read_timeline(node.rank_logs())
    assert timeline is not None
    found, why = times_of_ranks(timeline, [node])
    assert found is not None, why
    fast, slow = found.ranks
    assert slow.own_ms > 2 * fast.own_ms, found
    assert fast.wait_ms > (slow.own_ms - fast.own_ms) / 2, found
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


def test_a_run_of_jax_too_short_for_a_traced_step_says_so(plays: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "batch_size": 4, "end.max_steps": 3}
    job = rank_job("jax", tmp_path / "two", "llama_mini", {"shakespeare": plays}, settings)
    run_job(job, num_ranks=2)
    timeline = read_timeline(NodeDir(job.parent, "n1", 0, None, None).rank_logs())
    assert timeline is not None
    assert "no step was traced" in (times_of_ranks(timeline, [])[1] or "")


PADDLE_OPTIMIZED = """
import json, sys
from types import SimpleNamespace
import numpy as np, paddle
from accelmark.frameworks.paddle.hooks import Hooks
from accelmark.spec.settings.training import OptimizerSettings

optimizer, clip = json.loads(sys.argv[1])
settings = SimpleNamespace(optimizer=OptimizerSettings.model_validate(optimizer), gradient_clip_norm=clip)
model = paddle.nn.Linear(4, 3)
model.weight.set_value(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
model.bias.set_value(np.linspace(0.5, 1, 3, dtype=np.float32))
optimizer = Hooks(SimpleNamespace(settings=settings, place=None)).create_optimizer(model)
x = paddle.to_tensor(np.linspace(-2, 3, 8, dtype=np.float32).reshape(2, 4))
for _ in range(5):
    (model(x) ** 2).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
print(json.dumps([model.weight.numpy().tolist(), model.bias.numpy().tolist()]))
"""


def test_gradient_accumulation_with_recomputation_on_two_ranks_of_paddle_equals_a_larger_batch(
    plays: Path, tmp_path: Path
) -> None:
    data, over = {"shakespeare": plays}, {**SMALL, "batch_size": 2}
    over |= {"gradient_accumulation_steps": 2, "activation_checkpointing": "full"}
    job = rank_job("paddle", tmp_path / "two", "llama_mini", data, over)
    run_job(job, num_ranks=2)
    together = np.mean([losses_of(rank_events(job, rank)) for rank in (0, 1)], axis=0)
    whole = run_job(rank_job("paddle", tmp_path / "one", "llama_mini", data, SMALL))
    assert together[-1] < together[0]
    np.testing.assert_allclose(together, losses_of(whole), rtol=2e-5)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "adam", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "adamw", "lr": 0.05, "weight_decay": 0.1, "decay_norm_and_bias": False},
        {"name": "lamb", "lr": 0.05, "weight_decay": 0.1, "eps": 1e-6, "decay_norm_and_bias": False},
    ],
    ids=lambda settings: settings["name"] if isinstance(settings, dict) else None,
)
def test_optimizers_of_paddle_compute_what_pytorchs_compute(settings: dict[str, Any], clip: float | None) -> None:
    weight, bias = json.loads(run_program("paddle", PADDLE_OPTIMIZED, json.dumps([settings, clip]))[-1])
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


MOCK = """
import json, os, runpy, sys, time
import mindspore as ms
from mindspore import communication
from mindspore.device_context.ascend import op_precision

real = {"set_device": ms.set_device, "init": communication.init}
VARIABLES = ("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "RANK_ID", "RANK_SIZE", "DEVICE_ID")

def note(call):
    with open(f"calls{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")

def noted(name, then=lambda *values: None):
    def call(*values):
        note([name, *values])
        return then(*values)
    return call

class Event:
    def __init__(self, enable_timing):
        assert enable_timing
    def record(self):
        self.at = time.monotonic()
    def synchronize(self):
        pass
    def elapsed_time(self, end):
        return (end.at - self.at) * 1000

ms.set_device = noted("set_device", lambda target, index: real["set_device"]("CPU", 0))
for name in ("precision_mode", "matmul_allow_hf32", "conv_allow_hf32"):
    setattr(op_precision, name, noted(name))
communication.init = noted(
    "init", lambda backend: (note([os.environ[name] for name in VARIABLES]), real["init"]("mccl"))
)
ms.hal.get_device_name = lambda: "Ascend910B3"
ms.runtime.Event, ms.runtime.max_memory_allocated = Event, lambda: 5 * 2**20
sys.argv = ["rank", sys.argv[1]]
runpy.run_module("accelmark.train.loop.rank", run_name="__main__")
"""
"""A MOCK of Ascend: no such device is here, so MindSpore's calls for one are noted and go to the CPU.

It shows which calls the backend makes, in which order and with which values; it does not show that they work there.
"""
DEVICE = ["set_device", "precision_mode", "matmul_allow_hf32", "conv_allow_hf32", "init"]


def test_the_vendor_declares_mindspores_names_of_its_device() -> None:
    device = load_vendor("ascend").frameworks["mindspore"]
    assert (device.device_type, device.collective_backend) == ("Ascend", "hccl")
    assert not {"ascend", "Ascend"} & set(load_framework("mindspore").devices)


def test_ranks_open_their_own_ascend_device_with_hccl_and_no_hf32(plays: Path, tmp_path: Path) -> None:
    data = {"shakespeare": plays}
    changed = {"device_type": "Ascend", "collective_backend": "hccl", "vendor": "ascend"}
    settings: dict[str, Any] = {**SMALL, "precision": "tf32"}
    job = rank_job("mindspore", tmp_path / "mock", "llama_mini", data, settings, **changed)
    command, variables = rank_command(job, 2, MOCK)
    done = subprocess.run(command, env=variables, cwd=job.parent, timeout=400, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for rank in range(2):
        calls = [json.loads(line) for line in (job.parent / f"calls{rank}.jsonl").read_text().splitlines()]
        expected: list[list[object]] = [["Ascend", rank], ["must_keep_origin_dtype"], [False], [False], ["hccl"]]
        assert [call for call in calls if call[0] in DEVICE] == [
            [name, *given] for name, given in zip(DEVICE, expected, strict=True)
        ]
        assert calls[-1] == ["MS_WORKER", str(rank), "2", str(rank), "2", str(rank)]
    events = rank_events(job, 0)
    (started,), (finished,) = values(events, "INIT_END"), values(events, "FINISHED")
    assert (started["device_type"], started["device_name"], started["device_index"]) == ("Ascend", "Ascend910B3", 0)
    assert started["precision"] == "fp32", "not HF32, for which MindSpore has no name among the precisions"
    assert finished["peak_device_memory_mib"] == 5
    on_cpu = rank_job("mindspore", tmp_path / "cpu", "llama_mini", data, {**settings, "precision": "fp32"})
    run_job(on_cpu, num_ranks=2)
    for rank in range(2):
        np.testing.assert_array_equal(losses_of(rank_events(job, rank)), losses_of(rank_events(on_cpu, rank)))
