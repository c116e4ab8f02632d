import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.frameworks.pytorch.training.seeds import random_state, restore_random_state, seed_everything
from accelmark.spec.job import EvaluateJob, ReplayedPair, TrainJob
from tests.train.conftest import RunHere
from tests.train.jobs import make_job

BASE: dict[str, Any] = {
    "model.dropout": 0.2,
    "model.samples": 64,
    "end.max_steps": 14,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 3,
    "checkpoint.every_steps": 3,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.name": "adamw", "optimizer.lr": 0.01},
        {"optimizer.momentum": 0.9, "evaluate.every_steps": 5},
        {"optimizer.name": "lamb", "optimizer.lr": 0.02, "batch_size": 8, "gradient_accumulation_steps": 2},
        {"precision": "fp16"},
        {"parallelism": "fsdp2", "optimizer.name": "adamw", "optimizer.lr": 0.01},
    ],
    ids=["adamw", "sgd", "lamb", "fp16", "fsdp2"],
)
def test_a_resumed_run_continues_with_bitwise_equal_losses(
    tmp_path: Path, run_here: RunHere, settings: dict[str, Any]
) -> None:
    """The run is cut off at step 8, in the third epoch of four steps, and goes on from step 6 in the second."""
    settings = {**BASE, **settings}
    whole = run_here(make_job(tmp_path / "whole", settings)).losses()
    cut = run_here(make_job(tmp_path / "cut", {**settings, "model.fault": "error", "model.fault_at": _call(settings)}))
    assert cut.finished().state == "failed"
    resumed = run_here(make_job(tmp_path / "cut", settings, resume=True))
    assert resumed.values("TRAIN_START")[0] == {
        "global_steps": 6,
        "epoch": 1,
        "resumed": True,
        "total_steps": 14,
    }
    assert resumed.losses() == whole[6:]
    assert resumed.finished().num_trained_samples == 14 * 16


def _call(settings: dict[str, Any]) -> int:
    """The forward pass of step 8."""
    return 8 * int(settings.get("gradient_accumulation_steps", 1))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, run_here: RunHere) -> None:
    run_here(make_job(tmp_path, {**BASE, "checkpoint.keep": 2}))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step000000009", "step000000012", "step000000014"], "the final one in addition to the two"


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_final_weights_are_evaluated_and_steps_replayed(tmp_path: Path, run_here: RunHere, parallelism: str) -> None:
    trained = run_here(
        make_job(tmp_path, {**BASE, "checkpoint.every_steps": 5, "checkpoint.keep": 2, "parallelism": parallelism})
    )
    job = make_job(tmp_path, {**BASE, "parallelism": parallelism})
    assert isinstance(job.work, TrainJob)
    pair = ReplayedPair(start="step000000010", end="step000000014", first_step=11, num_steps=4)
    work = EvaluateJob(train=job.work, weights=("step000000014",), replays=(pair,))
    checked = run_here(job.model_copy(update={"work": work}))
    assert (checked.exit_code, checked.finished().end_reason) == (0, "evaluated"), checked.log()
    (evaluated,) = checked.values("EVALUATED")
    assert evaluated["metrics"] == trained.finished().final_metrics
    (replayed,) = checked.values("REPLAYED")
    assert replayed["first_step"] == 11
    assert replayed["losses"] == trained.losses()[10:]
    assert replayed["update"]["difference"] == 0
    assert replayed["update"]["replayed"] == replayed["update"]["saved"] > 0


def test_resuming_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path, resume=True))
    assert ran.finished().global_steps == len(ran.losses()) == 12


def test_an_incomplete_checkpoint_is_never_used(tmp_path: Path, run_here: RunHere) -> None:
    run_here(make_job(tmp_path, BASE))
    (tmp_path / "checkpoints" / "step000000099.tmp").mkdir()
    ran = run_here(make_job(tmp_path, BASE, resume=True))
    assert ran.values("TRAIN_START")[0]["global_steps"] == 14


@pytest.mark.parametrize(("parallelism", "file"), [("ddp", "weights.pt"), ("fsdp2", "shards/*.safetensors")])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, run_here: RunHere, parallelism: str, file: str) -> None:
    settings = {**BASE, "parallelism": parallelism}
    run_here(make_job(tmp_path, settings))
    checkpoint = tmp_path / "checkpoints" / "step000000014"
    (damaged,) = checkpoint.glob(file)
    damaged.write_bytes(damaged.read_bytes()[:100])
    ran = run_here(make_job(tmp_path, settings, resume=True))
    assert ran.exit_code == 1
    assert f"{checkpoint} cannot be read" in (ran.finished().message or "")


def test_a_checkpoint_of_another_number_of_ranks_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    run_here(make_job(tmp_path, BASE))
    record_file = tmp_path / "checkpoints" / "step000000014" / "progress.json"
    record_file.write_text(json.dumps({**json.loads(record_file.read_text()), "world_size": 4}))
    ran = run_here(make_job(tmp_path, BASE, resume=True))
    assert "has world_size 4, this job 1" in (ran.finished().message or "")


def test_a_full_disk_fails_the_run_and_leaves_no_half_checkpoint(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    ran = run_here(make_job(tmp_path, BASE))
    assert (ran.exit_code, ran.finished().end_reason) == (1, "error")
    assert "No space left on device" in (ran.finished().message or "")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_random_states_survive_a_file_without_pickle(tmp_path: Path) -> None:
    device = torch.device("cpu")
    seed_everything(5)
    torch.save(random_state(device), tmp_path / "state.pt")
    expected = torch.rand(3)
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True), device)
    assert torch.equal(torch.rand(3), expected)
