"""Checkpoints of hosts that share no directory: two launches on this machine, each with a directory of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.spec.errors import RunError
from accelmark.spec.job import EvaluateJob, JobSpec, ReplayedPair, TrainJob
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.checkpoint_directory import CheckpointDirectory
from accelmark.train.loop.checkpoints import ArrayCheckpoints
from accelmark.train.loop.contract import Progress
from tests.train.jobs import Ran, command, environment, make_job, node_dir_of, write_job

SETTINGS: dict[str, Any] = {
    "model.samples": 64,
    "batch_size": 4,
    "end.max_steps": 14,
    "optimizer.name": "adamw",
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 3,
}
HOSTS = ("host0", "host1")


def run_on_hosts(directory: Path, make: Callable[[Path], JobSpec]) -> list[Ran]:
    """Run a job of one rank per host, each with the files below its own directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for number, name in enumerate(HOSTS):
        place = directory / name
        node_dir = node_dir_of(place, f"{name}_noderank{number}")
        launch = command(write_job(make(place), place), 2)
        launch[launch.index("--nproc") + 1] = "1"
        where = ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
        launch[launch.index("--") : launch.index("--")] = where
        process = subprocess.Popen(
            launch, env=environment(node_dir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append((process, node_dir))
    outputs = [process.communicate(timeout=400)[0] for process, _ in started]
    return [Ran(node, done.returncode, text) for (done, node), text in zip(started, outputs, strict=True)]


def names(directory: Path, host: str) -> list[str]:
    return sorted(path.name for path in (directory / host / "checkpoints").iterdir())


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_hosts_without_a_shared_directory_resume_evaluate_and_replay(tmp_path: Path, parallelism: str) -> None:
    settings = SETTINGS | {"parallelism": parallelism}

    def train(place: Path, **more: Any) -> JobSpec:
        job = make_job(place, settings, **more)
        assert isinstance(job.work, TrainJob)
        return job.model_copy(
            update={
                "key": job.key.model_copy(update={"nnodes": 2}),
                "work": job.work.model_copy(update={"is_checked": True}),
            }
        )

    first, second = run_on_hosts(tmp_path, train)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + first.log() + second.output + second.log(1)
    assert names(tmp_path, "host0") == names(tmp_path, "host1")
    shards = {"ddp": [], "fsdp2": ["shards"]}[parallelism]
    final = tmp_path / "host1" / "checkpoints" / "step000000014"
    assert sorted(path.name for path in final.iterdir()) == ["progress.json", "random1.pt", *shards, "weights.pt"]

    metrics = first.finished().final_metrics
    hashes = [ran.values("CHECKPOINTS_HASHED", rank)[0]["sha256"] for rank, ran in enumerate((first, second))]
    assert hashes[0].keys() == hashes[1].keys()

    def evaluate(place: Path) -> JobSpec:
        job = train(place)
        assert isinstance(job.work, TrainJob)
        pair = ReplayedPair(start="step000000008", end="step000000014", first_step=9, num_steps=6)
        kept = {"step000000008", "step000000014"}
        assert kept <= hashes[0].keys()
        work = EvaluateJob(
            train=job.work,
            weights=("step000000014",),
            replays=(pair,),
            sha256={name: value for name, value in hashes[0].items() if name in kept},
            sha256_on_hosts={1: {name: value for name, value in hashes[1].items() if name in kept}},
        )
        return job.model_copy(update={"work": work})

    checked = run_on_hosts(tmp_path, evaluate)
    for rank, ran in enumerate(checked):
        assert (ran.exit_code, ran.finished(rank).end_reason) == (0, "evaluated"), ran.output + ran.log(rank)
        (replayed,) = ran.values("REPLAYED", rank)
        assert replayed["update"]["difference"] == 0
        assert ran.values("EVALUATED", rank)[0]["metrics"] == metrics != {}

    changed = tmp_path / "host1" / "checkpoints" / "step000000008" / "progress.json"
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "note": "edited"}))
    refused = run_on_hosts(tmp_path, evaluate)[1]
    assert refused.exit_code != 0, refused.output + refused.log(1)
    assert "step000000008 was changed after the end of training" in refused.log(1)

    shutil.rmtree(final)  # the second host lost its newest checkpoint, and one more was being written
    (final.parent / "step000000020.tmp").mkdir()
    resumed = run_on_hosts(tmp_path, lambda place: train(place, resume=True))
    assert resumed[0].values("TRAIN_START")[-1]["global_steps"] == 12, resumed[0].output + resumed[0].log()
    assert names(tmp_path, "host0") == names(tmp_path, "host1")
    pairs = [ran.values("CHECKPOINTS_HASHED", rank)[-1]["pairs"] for rank, ran in enumerate(resumed)]
    chain = [None, "step000000008", "step000000012", "step000000014"]
    assert pairs == [[list(pair) for pair in itertools.pairwise(chain)]] * 2


def _ranks(directories: list[Path], per_host: int) -> list[RankPlace]:
    world = len(directories)
    return [RankPlace(rank, rank % per_host, world, per_host) for rank in range(world)]


@pytest.mark.parametrize("is_shared", [True, False])
def test_arrays_are_written_once_for_each_directory(tmp_path: Path, is_shared: bool) -> None:
    hosts = [tmp_path / ("shared" if is_shared else f"host{number}") for number in range(2)]
    directories = [hosts[0], hosts[0], hosts[1], hosts[1]]
    barrier = threading.Barrier(4, timeout=60)
    asked: list[int] = []

    def save(checkpoints: ArrayCheckpoints, place: RankPlace) -> None:
        def state() -> dict[str, np.ndarray[Any, Any]]:
            asked.append(place.rank)
            return {"weights": np.arange(3.0)}

        checkpoints.save(state, Progress(global_steps=7), barrier.wait)

    ranks = _ranks(directories, 2)
    opened = [ArrayCheckpoints(directory, place) for place, directory in zip(ranks, directories, strict=True)]
    threads = [threading.Thread(target=save, args=each) for each in zip(opened, ranks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(asked) == ([0] if is_shared else [0, 2])
    for checkpoints in opened:
        newest = checkpoints.newest(lambda values: lambda: values)
        assert newest is not None
        arrays, progress = checkpoints.load(newest)
        assert (arrays["weights"].tolist(), progress.global_steps) == ([0.0, 1.0, 2.0], 7)


def _newest(directory: Path, others: int) -> Path | None:
    """Return the newest checkpoint of the second host, where the first one has it at step ``others``."""
    place = RankPlace(1, 0, 2, 1)
    return CheckpointDirectory(directory, place).newest(lambda values: lambda: [max(values[0], -float(others))])


def test_hosts_continue_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        (tmp_path / f"step{step:09d}").mkdir()
    (tmp_path / "step000000012.tmp").mkdir()
    assert _newest(tmp_path, 6) == tmp_path / "step000000006"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step000000003", "step000000006"]
    assert _newest(tmp_path, -1) is None
    with pytest.raises(RunError, match=r"step000000005: is missing on this host"):
        _newest(tmp_path, 5)
