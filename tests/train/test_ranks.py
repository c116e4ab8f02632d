"""Several real processes over gloo, started by a node agent; a slow rank, and one that never starts a collective."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.frameworks.pytorch.training import platform
from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import find_straggler, straggler_text, times_of_ranks
from accelmark.results.schema import RankTime
from accelmark.run.agent.stall import diagnose
from accelmark.run.controller.execution import stall_cause
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit
from accelmark.spec.plugins.framework import RankPlace
from tests.run.fakes import wait_for
from tests.train.conftest import RunHere
from tests.train.jobs import Ran, command, environment, make_job, node_dir_of, run, start, write_job

ADAM: dict[str, Any] = {"optimizer.name": "adamw", "optimizer.lr": 0.01, "evaluate.every_steps": 6}


TWO_RANKS: dict[str, Any] = {
    **ADAM, "batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clip_norm": 0.5,
}  # fmt: skip
SHARDED: dict[str, Any] = {
    **TWO_RANKS, "parallelism": "fsdp2", "checkpoint.every_steps": 6, "checkpoint.keep": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("ddp")
    return run(make_job(directory, TWO_RANKS, nproc=2), directory)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("fsdp2")
    return run(make_job(directory, SHARDED, nproc=2, extern=extern_of(directory, HONEST)), directory)


HONEST = """
    def convert_model(self, model):
        return super().convert_model(model)
"""


def extern_of(directory: Path, hook: str) -> Path:
    folder = directory / "vendor" / "tiny-pytorch"
    (folder / "extern").mkdir(parents=True)
    code = f"from accelmark.frameworks.pytorch.hooks import Hooks\n\n\nclass Extern(Hooks):{hook}"
    (folder / "extern" / "__init__.py").write_text(code)
    return folder


def mean_losses(ran: Ran) -> list[float]:
    pairs = zip(ran.losses(0), ran.losses(1), strict=True)
    return [((first or 0) + (second or 0)) / 2 for first, second in pairs]


def test_two_ranks_train_as_one_with_the_same_global_batch(ddp: Ran, tmp_path: Path, run_here: RunHere) -> None:
    """The tiny case deals its samples out in turn, so that both see the same global batches."""
    assert ddp.exit_code == 0, ddp.output
    assert [(item.rank, item.state, item.exit_code) for item in ddp.ranks()] == [
        (0, "succeeded", 0),
        (1, "succeeded", 0),
    ]
    first, second = (ddp.values("INIT_END", rank)[0] for rank in (0, 1))
    assert first["seed"] != second["seed"]
    assert first["parameter_hash"] == second["parameter_hash"]
    assert (first["checkpoint_hash"] is None, second["checkpoint_hash"]) == (False, None)
    assert {item["metadata"]["rank"] for item in ddp.events(1)} == {1}
    alone = run_here(make_job(tmp_path, {**ADAM, "batch_size": 16, "gradient_clip_norm": 0.5}))
    assert mean_losses(ddp) == pytest.approx([loss or 0 for loss in alone.losses()], rel=1e-4)
    assert ddp.finished().num_trained_samples == alone.finished().num_trained_samples
    assert ddp.finished().final_metrics == alone.finished().final_metrics


def test_sharded_ranks_train_as_replicated_ones_and_resume_to_the_bit(ddp: Ran, fsdp2: Ran, tmp_path: Path) -> None:
    assert fsdp2.exit_code == 0, fsdp2.output
    for rank in (0, 1):
        assert fsdp2.losses(rank) == pytest.approx(ddp.losses(rank), rel=1e-4)
        for ran in (ddp, fsdp2):
            counts = [value["metrics"]["count"] for value in ran.values("EVALUATE", rank)]
            assert counts == [101.0, 101.0], "every sample once over all ranks"
    directory = fsdp2.node_dir.parent
    (directory / "checkpoints" / "step000000012").rename(directory / "later")
    resumed = run(make_job(directory, SHARDED, nproc=2, resume=True), tmp_path)
    assert resumed.exit_code == 0, resumed.output
    assert resumed.losses(0) == fsdp2.losses(0)[6:]
    assert resumed.losses(1) == fsdp2.losses(1)[6:]


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    settings = {"model.fault": "kill", "model.fault_at": 5, "model.fault_rank": 1}
    ran = run(make_job(tmp_path, settings, nproc=2), tmp_path)
    assert ran.exit_code == 1
    first, second = ran.ranks()
    assert (second.rank, second.state, second.signal, second.exit_code) == (1, "signaled", "SIGKILL", -9)
    assert first.state == "cancelled"
    assert "because rank 1 did" in (first.reason or "")
    assert ran.finished(0).state != "completed"
    assert any("STEP_END" in line for line in second.last_lines)


@pytest.mark.parametrize(
    ("rank", "in_use", "reason"),
    [(0, False, "1/2 clients joined"), (1, False, "^the ranks cannot meet at 127.*timed out"), (0, True, "EADDRINUSE")],
)
def test_ranks_that_cannot_meet_end_soon_and_not_as_echoes_of_another_ranks_end(
    rank: int, in_use: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timedelta(minutes=5) == platform.MEETING_LIMIT
    monkeypatch.setattr(platform, "MEETING_LIMIT", timedelta(seconds=1))
    with socket.socket() as meeting:
        meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        meeting.bind(("", 0))
        if in_use:
            meeting.listen()
        monkeypatch.setattr(os, "environ", {**os.environ, COORDINATOR: f"127.0.0.1:{meeting.getsockname()[1]}"})
        with pytest.raises((RunError, dist.DistStoreError), match=reason):
            platform.join_ranks(None, RankPlace(rank, 0, 2, 1), torch.device("cpu"), needed=False)


def test_a_non_finite_loss_on_one_rank_ends_all_in_the_same_step(tmp_path: Path) -> None:
    settings = {"model.fault": "nan", "model.fault_at": 6, "model.fault_rank": 1, "end.max_steps": 2000}
    settings["log_every_steps"] = 2
    ran = run(make_job(tmp_path, settings, nproc=2), tmp_path)
    assert ran.exit_code == 1
    ends = [ran.finished(rank) for rank in (0, 1)]
    assert {(end.state, end.end_reason) for end in ends} == {("failed", "nonfinite_loss")}
    assert ends[0].global_steps == ends[1].global_steps < 100
    assert all("not finite at step 6" in (end.message or "") for end in ends)
    assert [item.state for item in ran.ranks()] == ["failed", "failed"]


@pytest.mark.heavy
def test_out_of_memory_on_one_rank_is_the_cause_and_the_other_follows(tmp_path: Path) -> None:
    settings = {"model.fault": "memory", "model.fault_at": 3, "model.fault_rank": 1}
    ran = run(make_job(tmp_path, settings, nproc=2), tmp_path)
    assert ran.exit_code == 1
    assert ran.finished(1).end_reason == "out_of_memory"
    assert ran.finished(0).state != "completed"
    reasons = {item.rank: item.reason or "" for item in ran.ranks()}
    assert "out of memory" in reasons[1]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def stopped(directory: Path, number: signal.Signals, nproc: int) -> Ran:
    """Send a signal to the launcher, or to a rank alone, after its last rank has ended a step."""
    settings = {"end.max_steps": 100000, "model.sleep_ms": 2, "checkpoint.every_steps": 100000}
    process, node_dir = start(make_job(directory, settings, nproc=nproc), directory)
    wait_for(lambda: '"event": "STEP_END"' in text_of(node_dir / f"rank{nproc - 1}.out.log"), "the end of a step")
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    return Ran(node_dir, process.returncode, output)


def test_stopping_the_launcher_lets_all_ranks_end_their_step(tmp_path: Path) -> None:
    ran = stopped(tmp_path, signal.SIGTERM, 2)
    assert ran.exit_code == 130, ran.output
    ends = [ran.finished(rank) for rank in (0, 1)]
    assert {(end.state, end.end_reason) for end in ends} == {("cancelled", "cancelled")}
    assert ends[0].global_steps == ends[1].global_steps
    assert [item.state for item in ran.ranks()] == ["cancelled", "cancelled"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step{ends[0].global_steps:09d}"]


def test_a_rank_alone_ends_its_step_when_told_to(tmp_path: Path) -> None:
    ran = stopped(tmp_path, signal.SIGINT, 1)
    finished = ran.finished()
    assert (ran.exit_code, finished.state, finished.end_reason) == (130, "cancelled", "cancelled")
    assert finished.message == f"ended by SIGINT after step {finished.global_steps}"
    assert len(ran.losses()) == finished.global_steps
    assert ran.values("EVALUATE") == []


def test_a_hanging_rank_still_writes_its_stacks(tmp_path: Path) -> None:
    """A main thread in a native call runs no handler: the listening thread speaks for it."""
    script = (
        "import os, signal, threading, time\n"
        "from accelmark.train.loop.process import StopRequest\n"
        "def overdue(name):\n"
        "    os.write(1, f'overdue after {name}'.encode())\n"
        "    os._exit(130)\n"
        "StopRequest().install(overdue, grace_s=0.3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))\n"
        "os.write(1, b'ready ')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 6) == b"ready "
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, output) == (130, "overdue after SIGTERM")


def test_a_job_that_cannot_be_read_still_ends_with_finished(tmp_path: Path) -> None:
    path = write_job(make_job(tmp_path), tmp_path)
    path.write_text(path.read_text().replace('"round"', '"rond"'))
    node_dir = node_dir_of(tmp_path)
    done = subprocess.run(command(path, 1), env=environment(node_dir), capture_output=True, timeout=60, check=False)
    ran = Ran(node_dir, done.returncode, "")
    assert ran.exit_code == 2
    assert ran.finished().state == "failed"
    assert "did you mean 'round'?" in (ran.finished().message or "")


SLOW_RANK = """
    def backward(self, loss, scaler):
        if self.place.rank == 1:
            import time
            time.sleep(0.15)
        super().backward(loss, scaler)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("parallelism", "nproc", "num_passes"), [("ddp", 2, 2), ("fsdp2", 2, 1), ("dp=2", 2, 1), ("dp=2,fsdp=2", 4, 1)]
)
def test_a_rank_that_computes_longer_is_named_and_the_others_wait_for_it(
    tmp_path: Path, parallelism: str, nproc: int, num_passes: int
) -> None:
    settings = {"parallelism": parallelism, "gradient_accumulation_steps": num_passes, "batch_size": 4}
    ran = run(make_job(tmp_path, settings, nproc=nproc, extern=extern_of(tmp_path, SLOW_RANK)), tmp_path)
    node = NodeDir(ran.node_dir, "n1", 0, None, None)
    timeline = read_timeline(node.rank_logs())
    assert timeline is not None, ran.output
    found, _ = times_of_ranks(timeline, [node])
    assert found is not None, ran.output
    fast, slow, *others = found.ranks
    lost_ms = 100 * num_passes  # passes of 150 ms, less what a load may cost
    assert all(slow.own_ms - other.own_ms > lost_ms for other in (fast, *others))
    assert parallelism != "ddp" or fast.wait_ms > lost_ms
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


def rank(number: int, host: str, own_ms: float, data_wait_ms: float = 1.0, longest_s: float = 0.1) -> RankTime:
    return RankTime(
        rank=number, host=host, step_ms=100.0, data_wait_ms=data_wait_ms, own_ms=own_ms, wait_ms=0.0,
        longest_s=longest_s, num_steps=690,
    )  # fmt: skip


def test_a_rank_that_costs_less_than_2_percent_is_not_named() -> None:
    assert find_straggler((rank(0, "a", 80.0), rank(1, "b", 81.9))) is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            (rank(0, "a", 80.0), rank(1, "a", 80.0), rank(2, "b", 80.0), rank(3, "b", 90.0)),
            "rank 3 on host b takes longer to compute than the others, which costs them 10\u202f% of each step",
        ),
        (
            (rank(0, "a", 80.0), rank(1, "a", 80.0), rank(2, "b", 89.0), rank(3, "b", 90.0)),
            "host b (all of its ranks; the slowest is rank 3) takes longer to compute than the others",
        ),
        (
            (rank(0, "a", 80.0, 21.0), rank(1, "b", 80.0)),
            "rank 0 on host a waits longer for its data than the others, which costs them 20\u202f% of each step",
        ),
        (
            (rank(0, "a", 80.0), rank(1, "b", 138.0, longest_s=40.0)),
            "rank 1 on host b paused in one step, for 40 s; the others waited for it",
        ),
    ],
)
def test_the_rank_or_the_host_is_named_with_what_takes_it_longer(ranks: tuple[RankTime, ...], text: str) -> None:
    straggler = find_straggler(ranks)
    assert straggler is not None
    assert text in straggler_text(straggler)


HANGS = """
    def backward(self, loss, scaler):
        self.calls = getattr(self, "calls", 0) + 1
        if self.place.rank == 1 and self.calls == 6:
            import time
            print("hangs", flush=True)
            time.sleep(3600)
        super().backward(loss, scaler)
"""


def test_the_rank_behind_in_collectives_is_named_with_its_last_one(tmp_path: Path) -> None:
    settings = {"end.max_steps": 100, "batch_size": 4, "log_every_steps": 1}
    began = time.monotonic()
    process, node_dir = start(make_job(tmp_path, settings, nproc=2, extern=extern_of(tmp_path, HANGS)), tmp_path)
    try:
        log = node_dir / "rank1.out.log"
        wait_for(lambda: process.poll() is not None or "hangs" in text_of(log), "rank 1 to hang")
        assert process.poll() is None, text_of(log)
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]

        def waits() -> bool:  # rank 0 comes to its exchange of gradients a little later
            ranks = diagnose(node_dir, pids, {0: 9.0, 1: 9.0}, began).ranks
            last = [{one.group: one.number for one in rank.collectives} for rank in ranks]
            return any(number > last[1].get(group, number) for group, number in last[0].items())

        wait_for(waits, "rank 0 to wait for rank 1")
        record = diagnose(node_dir, pids, {0: 9.0, 1: 9.0}, began)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        output, _ = process.communicate(timeout=60)
    ended = NodeExit(
        host="n1",
        noderank=0,
        started_at="",
        duration_s=9.0,
        state="timed_out",
        reason="stalled",
        ranks=(),
        stall=record,
    )
    cause = stall_cause([ended]) or ""
    assert cause.startswith("rank 1 stopped first: its last collective in group "), f"{cause}\n{record}\n{output}"
    assert "gloo:all" in cause, cause
