"""Checkpoints of hosts that share no directory: two launches on this machine, each with a directory of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accelmark.frameworks.array_backend import ArrayBackend
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec, ReplayedPair
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory
from accelmark.train.loop.contract import Progress
from tests.train.jobs import Ran, command, environment, evaluating, make_job, node_dir_of, with_work, write_job

SETTINGS: dict[str, Any] = {
    "model.samples": 64, "batch_size": 4, "end.max_steps": 14, "optimizer.name": "adamw", "checkpoint.every_steps": 3,
    "checkpoint.keep": 3,
}  # fmt: skip
HOSTS = ("host0", "host1")


def run_on_hosts(directory: Path, make: Callable[[Path], JobSpec], per_host: int = 1) -> list[Ran]:
    """Run a job of ``per_host`` ranks per host, each host with the files below its own directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for number, name in enumerate(HOSTS):
        place = directory / name
        node_dir = node_dir_of(place, f"{name}_noderank{number}")
        launch = command(write_job(make(place), place), 2)
        launch[launch.index("--nproc") + 1] = str(per_host)
        launch[launch.index("--free-port") : launch.index("--")] = ["--nnodes", "2", "--node-rank", str(number)]
        variables = {**environment(node_dir), COORDINATOR: endpoint}
        process = subprocess.Popen(launch, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append((process, node_dir))
    outputs = [process.communicate(timeout=400)[0] for process, _ in started]
    return [Ran(node, done.returncode, text) for (done, node), text in zip(started, outputs, strict=True)]


def _two_hosts_job(directory: Path, settings: dict[str, Any], **more: Any) -> JobSpec:
    job = make_job(directory, settings, **more)
    return job.model_copy(update={"key": job.key.model_copy(update={"nnodes": 2})})


def names(directory: Path, host: str) -> list[str]:
    return sorted(path.name for path in (directory / host / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("parallelism", "per_host"),
    [
        ("ddp", 2),
        pytest.param("ddp", 4, marks=pytest.mark.heavy),
        pytest.param("fsdp2", 2, marks=pytest.mark.heavy),
        pytest.param("fsdp2", 4, marks=pytest.mark.heavy),
        pytest.param("hsdp", 2, marks=pytest.mark.heavy),
        pytest.param("hsdp", 4, marks=pytest.mark.heavy),
    ],
)
def test_each_host_has_one_writer_of_its_checkpoints(tmp_path: Path, parallelism: str, per_host: int) -> None:
    settings = SETTINGS | {"parallelism": parallelism, "end.max_steps": 6, "model.samples": 256}
    ran = run_on_hosts(tmp_path, partial(_two_hosts_job, settings=settings, nproc=per_host), per_host)
    for host, done in enumerate(ran):
        ranks = range(host * per_host, (host + 1) * per_host)
        assert done.exit_code == 0, done.output + "".join(done.log(rank) for rank in ranks)
        assert [item.rank for item in done.ranks()] == list(ranks), "numbered by host"
        checkpoint = tmp_path / HOSTS[host] / "checkpoints" / "step000000006"
        assert json.loads((checkpoint / "progress.json").read_text())["writer"] == ranks[0]
        random = {f"random{rank}.pt" for rank in ranks}
        shards = set() if parallelism == "ddp" else {"shards"}
        assert {path.name for path in checkpoint.iterdir()} == {"progress.json", "weights.pt"} | random | shards
    assert names(tmp_path, "host0") == names(tmp_path, "host1") == ["step000000003", "step000000006"]


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_hosts_without_a_shared_directory_resume_evaluate_and_replay(tmp_path: Path, parallelism: str) -> None:
    settings = SETTINGS | {"parallelism": parallelism}

    def train(place: Path, **more: Any) -> JobSpec:
        return with_work(_two_hosts_job(place, settings, **more), is_checked=True)

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
        pair = ReplayedPair(start="step000000008", end="step000000014", first_step=9, num_steps=6)
        kept = {"step000000008", "step000000014"}
        assert kept <= hashes[0].keys()
        return evaluating(
            train(place),
            weights=("step000000014",),
            replays=(pair,),
            sha256={name: value for name, value in hashes[0].items() if name in kept},
            sha256_on_hosts={1: {name: value for name, value in hashes[1].items() if name in kept}},
        )

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


class Exchange:
    """Exchanges maxima between the threads of a test, one for each rank."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self._values: list[list[float]] = []

    def maximum(self, values: list[float]) -> Callable[[], list[float]]:
        self._values.append(values)
        self.barrier.wait()
        joint = [max(column) for column in zip(*self._values, strict=True)]
        if self.barrier.wait() == 0:
            self._values.clear()
        self.barrier.wait()
        return lambda: joint


@pytest.mark.parametrize(
    ("shares", "writers"), [((0, 0, 0), [0]), ((0, 1, 2), [0, 2, 4]), ((0, 1, 1), [0, 2]), ((0, 1, 0), [0, 2])]
)
def test_arrays_are_written_once_for_each_directory(
    tmp_path: Path, shares: tuple[int, ...], writers: list[int]
) -> None:
    """``shares`` numbers the directory of each of three hosts, which have two ranks each."""
    exchange = Exchange(6)
    written: list[int] = []

    def save(rank: int) -> None:
        place = RankPlace(rank, rank % 2, 6, 2)
        directory = CheckpointDirectory(tmp_path / str(shares[rank // 2]), place, exchange.maximum)
        loaded: list[Mapping[str, np.ndarray[Any, Any]]] = []

        def state() -> dict[str, np.ndarray[Any, Any]]:
            written.append(rank)
            return {"weights": np.arange(3.0)}

        backend: Any = SimpleNamespace(checkpoints=directory, place=place, state=state, set_state=loaded.append)
        backend.mean = lambda _: exchange.barrier.wait()
        ArrayBackend.save(backend, Progress(global_steps=7))
        newest = directory.newest()
        assert newest is not None
        assert ArrayBackend.load(backend, newest) == Progress(global_steps=7)
        assert loaded[0]["weights"].tolist() == [0.0, 1.0, 2.0]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(save, range(6)))
    assert sorted(written) == writers
    assert {path.name for path in tmp_path.glob("*/*")} == {"step000000007"}


def _newest(directory: Path, others: int) -> Path | None:
    """Return the newest checkpoint of the second host, where the first one has it at step ``others``."""
    place = RankPlace(1, 0, 2, 1)
    return CheckpointDirectory(directory, place, lambda values: lambda: [max(values[0], -float(others))]).newest()


def test_hosts_continue_from_the_newest_checkpoint_that_all_have(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        (tmp_path / f"step{step:09d}").mkdir()
    (tmp_path / "step000000012.tmp").mkdir()
    assert _newest(tmp_path, 6) == tmp_path / "step000000006"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step000000003", "step000000006"]
    assert _newest(tmp_path, -1) is None
    with pytest.raises(RunError, match=r"step000000005: is missing on this host"):
        _newest(tmp_path, 5)
