import errno
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.spec.job import KilledRank, ReplayedPair
from accelmark.train.loop.checkpoint_writer import CheckpointWriter
from tests.train.conftest import RunHere
from tests.train.jobs import environment, evaluating, make_job, node_dir_of, run, with_work, write_job

BASE: dict[str, Any] = {
    "model.dropout": 0.2, "model.samples": 64, "end.max_steps": 14, "schedule.name": "cosine",
    "schedule.warmup_steps": 3, "checkpoint.every_steps": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.name": "adamw", "optimizer.lr": 0.01},
        {"optimizer.momentum": 0.9, "evaluate.every_steps": 5},
        {"optimizer.name": "lamb", "optimizer.lr": 0.02, "batch_size": 8, "gradient_accumulation_steps": 2},
        {"precision": "fp16"},
        {"parallelism": "fsdp2", "optimizer.name": "adamw", "optimizer.lr": 0.01},
        {"optimizer.name": "adamw", "optimizer.lr": 0.01, "checkpoint.asynchronous": True},
        {"parallelism": "fsdp2", "optimizer.momentum": 0.9, "checkpoint.asynchronous": True},
    ],
    ids=["adamw", "sgd", "lamb", "fp16", "fsdp2", "asynchronous", "asynchronous-fsdp2"],
)
def test_a_resumed_run_continues_with_bitwise_equal_losses(
    tmp_path: Path, run_here: RunHere, settings: dict[str, Any]
) -> None:
    """The run is cut off at step 8, in the third epoch of four steps, and goes on from step 6 in the second."""
    settings = {**BASE, **settings}
    whole = run_here(make_job(tmp_path / "whole", settings)).losses()
    forward_pass = 8 * settings.get("gradient_accumulation_steps", 1)
    cut = run_here(make_job(tmp_path / "cut", {**settings, "model.fault": "error", "model.fault_at": forward_pass}))
    assert cut.finished().state == "failed"
    resumed = run_here(make_job(tmp_path / "cut", settings, resume=True))
    assert resumed.values("TRAIN_START")[0] == {"global_steps": 6, "epoch": 1, "resumed": True, "total_steps": 14}
    assert resumed.losses() == whole[6:]
    assert resumed.finished().num_trained_samples == 14 * 16


@pytest.mark.parametrize(
    "settings",
    [{}, {"parallelism": "fsdp2", "optimizer.name": "adamw", "optimizer.lr": 0.01}, {"checkpoint.asynchronous": True}],
    ids=["ddp", "fsdp2", "asynchronous"],
)
def test_a_run_resumes_exactly_from_a_checkpoint_for_the_replay(
    tmp_path: Path, run_here: RunHere, settings: dict[str, Any]
) -> None:
    """``checkpoint.every_steps`` is null; the pairs end at steps 8, 16 and 24, and the run is cut off at step 20."""
    settings = {**BASE, "optimizer.momentum": 0.9, "checkpoint.every_steps": None, "end.max_steps": 28, **settings}
    whole = run_here(_checked(make_job(tmp_path / "whole", settings))).losses()
    run_here(_checked(make_job(tmp_path / "cut", {**settings, "model.fault": "error", "model.fault_at": 20})))
    resumed = run_here(_checked(make_job(tmp_path / "cut", settings, resume=True)))
    assert resumed.values("TRAIN_START")[0]["global_steps"] == 16
    assert resumed.losses() == whole[16:]
    (hashes,) = resumed.values("CHECKPOINTS_HASHED")
    left = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    steps = [0, 8, 16, 24, 28]
    names = [None, *(f"step{step:09d}" for step in steps[1:])]
    assert left == sorted(hashes["sha256"]) == names[1:]
    assert hashes["steps"] == dict(zip(names[1:], steps[1:], strict=True))
    assert hashes["pairs"] == [list(pair) for pair in itertools.pairwise(names)], "those of the first attempt, too"


def test_a_run_that_starts_again_leaves_no_checkpoint_to_resume_from_later(tmp_path: Path, run_here: RunHere) -> None:
    settings = {**BASE, "checkpoint.every_steps": None}
    run_here(_checked(make_job(tmp_path, settings)))
    run_here(_checked(make_job(tmp_path, {**settings, "model.fault": "error", "model.fault_at": 4})))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_resumed_from_the_weights_that_reached_its_target_trains_no_further(
    tmp_path: Path, run_here: RunHere
) -> None:
    settings = {**BASE, "checkpoint.every_steps": None, "model.dropout": 0.0, "evaluate.every_steps": 2}
    job = _checked(make_job(tmp_path, {**settings, "end.max_steps": 200, "end.at_target": True}))
    first = run_here(job).finished()
    assert (first.end_reason, first.global_steps < 200) == ("target", True)
    again = run_here(job.model_copy(update={"resume": True}))
    assert (again.finished().end_reason, again.finished().global_steps) == ("target", first.global_steps)
    assert again.losses() == []
    assert again.finished().final_metrics == first.final_metrics
    assert (tmp_path / "checkpoints" / f"step{first.global_steps:09d}" / "weights.pt").exists()


_checked = partial(with_work, is_checked=True)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, run_here: RunHere) -> None:
    run_here(make_job(tmp_path, {**BASE, "checkpoint.keep": 2}))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step000000009", "step000000012", "step000000014"], "the final one in addition to the two"


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_final_weights_are_evaluated_and_steps_replayed(tmp_path: Path, run_here: RunHere, parallelism: str) -> None:
    settings = {**BASE, "parallelism": parallelism, "optimizer.momentum": 0.9}
    trained = run_here(make_job(tmp_path, {**settings, "checkpoint.every_steps": 5, "checkpoint.keep": 2}))
    pair = ReplayedPair(start="step000000010", end="step000000014", first_step=11, num_steps=4)
    checked = run_here(evaluating(make_job(tmp_path, settings), weights=("step000000014",), replays=(pair,)))
    assert (checked.exit_code, checked.finished().end_reason) == (0, "evaluated"), checked.log()
    (evaluated,) = checked.values("EVALUATED")
    assert evaluated["metrics"] == trained.finished().final_metrics
    (replayed,) = checked.values("REPLAYED")
    assert replayed["first_step"] == 11
    assert replayed["losses"] == trained.losses()[10:]
    assert replayed["update"]["difference"] == 0
    assert replayed["update"]["replayed"] == replayed["update"]["saved"] > 0
    assert set(replayed["state"]) == {"momentum_buffer"}
    assert replayed["state"]["momentum_buffer"]["saved"] > replayed["state"]["momentum_buffer"]["difference"] == 0


def test_a_frozen_parameter_that_is_replaced_and_a_changed_momentum_are_seen(tmp_path: Path, run_here: RunHere) -> None:
    settings = {
        **BASE, "optimizer.momentum": 0.9, "checkpoint.every_steps": 7, "checkpoint.keep": 2, "model.frozen": True,
    }  # fmt: skip
    run_here(make_job(tmp_path, settings))
    first = ReplayedPair(start=None, end=None, first_step=1, num_steps=1)
    last = ReplayedPair(start="step000000007", end="step000000014", first_step=8, num_steps=7)
    job = evaluating(make_job(tmp_path, settings), weights=("step000000014",), replays=(first, last))
    file = tmp_path / "checkpoints" / "step000000014" / "weights.pt"
    state = torch.load(file, weights_only=True)
    for values in state["optimizer"]["state"].values():
        values["momentum_buffer"] *= 3
    torch.save(state, file)
    _, replayed = run_here(job).values("REPLAYED")
    assert replayed["update"]["difference"] == 0
    found = replayed["state"]["momentum_buffer"]
    assert found["difference"] == pytest.approx(4 * found["replayed"])
    state["model"]["stem.weight"] += 1
    torch.save(state, file)
    assert "stem.weight" in str(run_here(job).finished().message)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW changes weights and state in place meanwhile: the files have those of their step."""
    settings = {**BASE, "optimizer.name": "adamw", "checkpoint.keep": 9}
    whole = run_here(make_job(tmp_path / "waiting", settings))
    release, written, settle = threading.Event(), torch.save, CheckpointWriter.settle

    def slow(value: object, path: Path) -> None:
        if "step000000003" in str(path):
            release.wait(60)
        written(value, path)

    def released(writer: CheckpointWriter) -> None:
        """Let the write of step 3 go on only when training waits for it, three steps later."""
        if writer._totals.progress.global_steps > 3:
            release.set()
        settle(writer)

    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(CheckpointWriter, "settle", released)
    ran = run_here(make_job(tmp_path / "asynchronous", {**settings, "checkpoint.asynchronous": True}))
    assert ran.losses() == whole.losses()
    events = ran.values("CHECKPOINT")
    assert [each["global_steps"] for each in events] == [3, 6, 9, 12, 14]
    assert all(each["background_s"] > 0 and each["num_bytes"] > 0 for each in events)
    assert whole.values("CHECKPOINT")[0]["background_s"] is None
    for name in (each["name"] for each in events):
        parts = [tmp_path / each / "checkpoints" / name / "weights.pt" for each in ("waiting", "asynchronous")]
        one, other = (torch.load(part, weights_only=True) for part in parts)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.heavy
def test_a_kill_during_a_write_leaves_the_checkpoint_before(tmp_path: Path, run_here: RunHere) -> None:
    settings = {**BASE, "checkpoint.asynchronous": True}
    whole = run_here(make_job(tmp_path / "whole", settings)).losses()
    job = with_work(make_job(tmp_path / "cut", settings), killed=KilledRank(rank=0, step=8))
    node_dir = node_dir_of(tmp_path / "cut")
    command = [sys.executable, "-c", _SLOW_RANK, str(write_job(job, tmp_path / "cut"))]
    assert subprocess.run(command, env=environment(node_dir), check=False, timeout=200).returncode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert names == ["step000000003", "step000000006.tmp"]
    resumed = run_here(make_job(tmp_path / "cut", settings, resume=True))
    assert resumed.values("TRAIN_START")[0]["global_steps"] == 3
    assert resumed.losses() == whole[3:]


_SLOW_RANK = """
import runpy, time, torch
written = torch.save
def slow(value, path):
    if "step000000006" in str(path):
        time.sleep(600)
    written(value, path)
torch.save = slow
runpy.run_module("accelmark.train.loop.rank", run_name="__main__", alter_sys=False)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_two_ranks_resume_from_an_asynchronous_checkpoint(tmp_path: Path, parallelism: str) -> None:
    settings = {**BASE, "batch_size": 8, "parallelism": parallelism, "checkpoint.keep": 9}
    settings |= {"checkpoint.asynchronous": True, "optimizer.name": "adamw", "optimizer.lr": 0.01}
    whole = run(make_job(tmp_path, settings, nproc=2), tmp_path / "first")
    assert whole.finished().state == "completed", whole.output
    for step in (12, 14):
        shutil.rmtree(tmp_path / "checkpoints" / f"step{step:09d}")
    resumed = run(make_job(tmp_path, settings, nproc=2, resume=True), tmp_path / "second")
    assert resumed.values("TRAIN_START")[0]["global_steps"] == 9
    assert resumed.losses() == whole.losses()[9:]


def test_resuming_uses_no_incomplete_checkpoint_and_starts_without_one(tmp_path: Path, run_here: RunHere) -> None:
    (tmp_path / "checkpoints" / "step000000099.tmp").mkdir(parents=True)
    for begin in (0, 14):
        ran = run_here(make_job(tmp_path, BASE, resume=True))
        assert ran.values("TRAIN_START")[0]["global_steps"] == begin
        assert len(ran.losses()) == 14 - begin


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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_fails_the_run_and_leaves_no_half_checkpoint(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    ran = run_here(make_job(tmp_path, {**BASE, "checkpoint.asynchronous": asynchronous}))
    assert (ran.exit_code, ran.finished().end_reason) == (1, "error")
    assert "No space left on device" in (ran.finished().message or "")
    assert list((tmp_path / "checkpoints").iterdir()) == []
