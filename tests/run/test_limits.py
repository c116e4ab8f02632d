"""Limits of a running job, and which rank of a stalled job is named, by the evidence of all hosts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from accelmark.run.agent.rank_exit import Termination
from accelmark.run.agent.stall import LimitChecker
from accelmark.run.agent.task import Limits
from accelmark.run.controller.execution import stall_cause
from accelmark.spec.job import LastCollective, NodeExit, RankStall, StallRecord
from accelmark.spec.log.perflog import encode_line

FINISHED = encode_line("FINISHED", {"state": "completed"}, {"time_ms": 0, "mono_ms": 0, "rank": 0}) + "\n"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The watch's clock, which a busy machine does not put forward."""
    stands = SimpleNamespace(at=0.0)
    monkeypatch.setattr("accelmark.run.agent.stall.time", SimpleNamespace(monotonic=lambda: stands.at))
    return stands


def watched(clock: SimpleNamespace, node_dir: Path, *writing: int) -> Termination | None:
    """Look for half a second, during which the ranks ``writing`` go on with their logs."""
    watch = LimitChecker(
        Limits(stall_timeout_s=0.2, min_free_mib=0.0), node_dir, range(2), "start_pytorch_task.log", started=clock.at
    )
    for _ in range(50):
        for rank in writing:
            say(node_dir, rank, "a step\n")
        breach = watch.check()
        if breach is not None:
            return breach
        clock.at += 0.01
    return None


def say(node_dir: Path, rank: int, text: str) -> None:
    with (node_dir / f"rank{rank}.out.log").open("a") as file:
        file.write(text)


BEGUN = FINISHED.replace("FINISHED", "INIT_START")
NO_END = "all of this host's 2 ranks finished, but a process did not end within 0.2 s"


@pytest.mark.parametrize(
    ("said", "writing", "reason"),
    [
        (("", "a step\n"), (0,), "rank 1 wrote nothing for 0.2 s"),
        ((FINISHED, ""), (1,), None),
        ((BEGUN, FINISHED), (0, 1), "rank 0 wrote no event for 0.2 s"),
        ((FINISHED, FINISHED), (), NO_END),
    ],
    ids=["one hangs", "finished or writing", "only events count after the first", "finished ranks must exit"],
)
def test_a_rank_stalls_that_is_silent_and_has_not_finished(
    said: tuple[str, str], writing: tuple[int, ...], reason: str | None, clock: SimpleNamespace, tmp_path: Path
) -> None:
    for number, text in enumerate(said):
        say(tmp_path, number, text)
    expected = Termination("stalled", "timed_out", reason) if reason is not None else None
    assert watched(clock, tmp_path, *writing) == expected


def test_a_rank_that_prints_without_end_fails(tmp_path: Path) -> None:
    limits = Limits(max_log_mib=0.001, min_free_mib=0.0)
    watch = LimitChecker(limits, tmp_path, range(2), "start_pytorch_task.log")
    say(tmp_path, 1, "x" * 2000)
    what = "the log of rank 1 exceeds 0.001 MiB: make it print less"
    assert watch.check() == Termination("failed", "failed", what)


def test_an_event_among_other_output_counts_as_activity(clock: SimpleNamespace, tmp_path: Path) -> None:
    say(tmp_path, 0, BEGUN)
    watch = LimitChecker(Limits(stall_timeout_s=0.2, min_free_mib=0.0), tmp_path, range(1), "start_pytorch_task.log")
    for look in range(50):
        say(tmp_path, 0, "socket.cpp: will retry\n" * 100 + (BEGUN if look % 10 == 0 else "") + "half a li")
        assert watch.check() is None
        clock.at += 0.01


WAITS = ("torch/distributed/distributed_c10d.py:10 in all_reduce", "loop.py:3 in step")
LAST = (LastCollective(group="default", operation="gloo:all_reduce", number=12, state="scheduled"),)
LOADS = ("torch/utils/data/dataloader.py:7 in next", "loop.py:2 in step")


def rank(number: int, **changed: object) -> RankStall:
    values: dict[str, object] = {
        "rank": number, "pid": 100 + number, "process_state": "S", "waits_in": None, "silent_s": 10.0,
        "has_finished": False, "last_step": 7, "stack": WAITS,
    }  # fmt: skip
    return RankStall.model_validate(values | changed)


def cause(*ranks: RankStall, **record: object) -> str | None:
    exits = []
    for one in ranks:
        values: dict[str, object] = {
            "host": f"n{one.rank}", "noderank": one.rank, "state": "timed_out", "ranks": (),
            "reason": f"rank {one.rank} wrote no event for 9 s", "started_at": "2026-01-01T00:00:00Z",
            "duration_s": 1.0,
            "stall": StallRecord.model_validate({"ranks": (one,)} | record),
        }  # fmt: skip
        exits.append(NodeExit.model_validate(values))
    return stall_cause(exits)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((rank(0, silent_s=0.5), rank(1)), "n1: rank 1 wrote no event for 9 s; it was at "),
        ((rank(0), rank(1, process_state="T", stack=())), "n1: rank 1 stopped first: its process is stopped (state T"),
        (
            (rank(0), rank(1, process_state="D", waits_in="nfs_wait_bit_killable", stack=())),
            "n1: rank 1 stopped first: its process is in uninterruptible sleep in nfs_wait_bit_killable (state D)",
        ),
        ((rank(0), rank(1, last_step=6)), "n1: rank 1 stopped first: its last step was 6, that of the others 7"),
        (
            (rank(0, collectives=LAST), rank(1, collectives=(LAST[0].model_copy(update={"number": 11}),))),
            "n1: rank 1 stopped first: its last collective in group default was number 11 (gloo:all_reduce), that",
        ),
        ((rank(0), rank(1, stack=LOADS)), "n1: rank 1 stopped first: it is the only one that does not wait in comm"),
        ((rank(0), rank(1)), "which rank stopped first is unknown"),
        ((rank(0, stack=LOADS), rank(1, stack=())), "which rank stopped first is unknown"),
    ],
)  # fmt: skip
def test_the_strongest_evidence_names_the_rank_else_it_is_unknown(ranks: tuple[RankStall, ...], expected: str) -> None:
    assert (cause(*ranks) or "").startswith(expected), cause(*ranks)


def test_full_file_systems_and_the_kernel_are_named() -> None:
    found = cause(rank(0), full_file_systems=("/dev/shm is full",), kernel_messages=("old", "NVRM: Xid 79"))
    assert (found or "").endswith("; /dev/shm is full on n0; the kernel of n0: NVRM: Xid 79")


def test_ranks_that_have_finished_do_not_stall() -> None:
    assert cause(rank(0, has_finished=True)) is None
