"""DeepSpeed's ZeRO, with real ranks and the package in a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelmark.frameworks.pytorch.training.zero import OWN_PART_UNKNOWN
from accelmark.spec.job import ReplayedPair
from tests.frameworks.environments import made_once
from tests.train.jobs import Ran, evaluating, make_job, run
from tests.train.test_mesh import takes_the_steps_of_one_rank, tokens
from tests.train.test_ranks import extern_of, mean_losses

__all__ = ["tokens"]

pytestmark = pytest.mark.heavy

_PACKAGES = ("deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
"""DeepSpeed with what it needs beyond the packages of all tests."""
_SETTINGS: dict[str, Any] = {
    "optimizer.name": "adamw", "optimizer.lr": 0.01, "evaluate.every_steps": 6, "batch_size": 4,
    "gradient_accumulation_steps": 2, "gradient_clip_norm": 0.5, "checkpoint.every_steps": 6, "checkpoint.keep": 3,
    "optimizer.weight_decay": 0.1, "optimizer.decay_norm_and_bias": False,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """Install DeepSpeed where it does not exist or its version has changed, and let ranks find it."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    wanted = [line for line in lines if line.partition("==")[0] in _PACKAGES]

    def install(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *wanted], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(made_once("deepspeed", "\n".join(wanted), install)))
        yield


def over(**more: Any) -> dict[str, Any]:
    return {**_SETTINGS, "parallelism": "deepspeed", **{name.replace("__", "."): value for name, value in more.items()}}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("ddp")
    return run(make_job(directory, _SETTINGS, nproc=2), directory)


@pytest.mark.parametrize(
    "zero",
    [
        {"zero__stage": 1},
        {"zero__stage": 2, "zero__offload": "optimizer", "zero__reduce_bucket_size": 200, "zero__overlap_comm": True},
        {"zero__stage": 3, "zero__stage3_param_persistence_threshold": 0, "checkpoint__asynchronous": True},
        {"zero__stage": 3, "zero__offload": "all"},
    ],
    ids=["1", "2-offload", "3-asynchronous", "3-offload"],
)
def test_zero_trains_as_ddp_and_resumes_to_the_bit(ddp: Ran, tmp_path: Path, zero: dict[str, Any]) -> None:
    whole = run(make_job(tmp_path, over(**zero), nproc=2), tmp_path)
    assert whole.exit_code == 0, whole.output + whole.log()
    assert mean_losses(whole) == pytest.approx(mean_losses(ddp), rel=1e-6)
    assert whole.finished().final_metrics == ddp.finished().final_metrics
    started = whole.values("INIT_END")[0]
    for name in ("optimizer_class", "parameter_hash", "num_parameters", "checkpoint_hash", "compute_type"):
        assert started[name] == ddp.values("INIT_END")[0][name]
    assert started["own_part_unknown"] == OWN_PART_UNKNOWN
    shutil.rmtree(tmp_path / "checkpoints" / "step000000012")
    resumed = run(make_job(tmp_path, over(**zero), nproc=2, resume=True), tmp_path / "resumed")
    assert resumed.exit_code == 0, resumed.output + resumed.log()
    for rank in (0, 1):
        assert resumed.losses(rank) == whole.losses(rank)[6:]


def test_bf16_trains_close_to_ddp_in_bf16(tmp_path: Path) -> None:
    found = []
    trained: dict[str, dict[str, Any]] = {"ddp": {"parallelism": "ddp"}, "2": {"zero__stage": 2}, "3": {}}
    for name, more in trained.items():
        ran = run(make_job(tmp_path / name, over(precision="bf16", **more), nproc=2), tmp_path / name)
        assert ran.exit_code == 0, ran.output + ran.log()
        assert ran.values("INIT_END")[0]["compute_type"] == "bfloat16"
        found.append(mean_losses(ran))
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=0.02)
        assert losses != pytest.approx(found[0], rel=1e-9), "gradients are exchanged in bf16"


def test_another_stage_and_number_of_ranks_goes_on(ddp: Ran, tmp_path: Path) -> None:
    first = run(make_job(tmp_path, over(zero__stage=3, end__max_steps=6), nproc=2), tmp_path)
    assert first.exit_code == 0, first.output + first.log()
    job = make_job(tmp_path, over(zero__stage=1, batch_size=8), nproc=1, resume=True)
    alone = run(job, tmp_path / "alone")
    assert alone.exit_code == 0, alone.output + alone.log()
    assert alone.losses() == pytest.approx(mean_losses(ddp)[6:], rel=1e-5)
    refused = run(make_job(tmp_path, _SETTINGS, nproc=2, resume=True), tmp_path / "ddp")
    assert refused.exit_code != 0
    assert "has parallelism deepspeed, this job ddp" in refused.log()


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_evaluated_and_steps_replayed(tmp_path: Path, stage: int) -> None:
    job = make_job(tmp_path, over(zero__stage=stage), nproc=2)
    trained = run(job, tmp_path)
    assert trained.exit_code == 0, trained.output + trained.log()
    pair = ReplayedPair(start="step000000006", end="step000000012", first_step=7, num_steps=6)
    checked = run(evaluating(job, weights=("step000000012",), replays=(pair,)), tmp_path / "checked")
    assert checked.exit_code == 0, checked.output + checked.log()
    (evaluated,), (replayed,) = checked.values("EVALUATED"), checked.values("REPLAYED")
    assert evaluated["metrics"] == trained.finished().final_metrics
    assert replayed["losses"] == trained.losses()[6:]
    assert replayed["update"]["difference"] == 0
    assert replayed["update"]["replayed"] == replayed["update"]["saved"] > 0


def test_hooks_that_the_engine_replaces_are_refused(tmp_path: Path) -> None:
    extern = extern_of(tmp_path, "\n    def train_step(self, training, batches):\n        return super()")
    ran = run(make_job(tmp_path, over(), nproc=1, extern=extern), tmp_path)
    assert ran.exit_code != 0
    assert "the vendor's hooks train_step do what DeepSpeed's engine does" in ran.log()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_llama_takes_the_first_steps_of_one_rank(tmp_path: Path, tokens: Path, stage: int) -> None:
    """Logits, losses and weights, with checkpointed activations."""
    more = {"zero.stage": stage, "activation_checkpointing": "full"}
    takes_the_steps_of_one_rank(tokens, tmp_path, "deepspeed", **more)
