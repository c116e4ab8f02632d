"""Limits of a running job: stalled and finished ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from accelmark.run.agent.rank_exit import Termination
from accelmark.run.agent.stall import LimitChecker
from accelmark.run.agent.task import Limits
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


def test_a_rank_that_hangs_stalls_while_another_still_writes(clock: SimpleNamespace, tmp_path: Path) -> None:
    say(tmp_path, 1, "a step\n")
    assert watched(clock, tmp_path, 0) == Termination("stalled", "timed_out", "rank 1 wrote nothing for 0.2 s")


def test_ranks_that_write_and_ranks_that_have_finished_do_not_stall(clock: SimpleNamespace, tmp_path: Path) -> None:
    say(tmp_path, 0, FINISHED)
    assert watched(clock, tmp_path, 1) is None


def test_a_rank_that_prints_without_end_fails(tmp_path: Path) -> None:
    limits = Limits(max_log_mib=0.001, min_free_mib=0.0)
    watch = LimitChecker(limits, tmp_path, range(2), "start_pytorch_task.log")
    say(tmp_path, 1, "x" * 2000)
    what = "the log of rank 1 exceeds 0.001 MiB: make it print less"
    assert watch.check() == Termination("failed", "failed", what)


def test_only_events_count_as_activity_after_the_first_event(clock: SimpleNamespace, tmp_path: Path) -> None:
    say(tmp_path, 0, FINISHED.replace("FINISHED", "INIT_START"))
    say(tmp_path, 1, FINISHED)
    assert watched(clock, tmp_path, 0, 1) == Termination("stalled", "timed_out", "rank 0 wrote no event for 0.2 s")


def test_an_event_among_other_output_counts_as_activity(clock: SimpleNamespace, tmp_path: Path) -> None:
    begun = FINISHED.replace("FINISHED", "INIT_START")
    say(tmp_path, 0, begun)
    watch = LimitChecker(Limits(stall_timeout_s=0.2, min_free_mib=0.0), tmp_path, range(1), "start_pytorch_task.log")
    for look in range(50):
        say(tmp_path, 0, "socket.cpp: will retry\n" * 100 + (begun if look % 10 == 0 else "") + "half a li")
        assert watch.check() is None
        clock.at += 0.01


def test_ranks_that_finished_must_exit(clock: SimpleNamespace, tmp_path: Path) -> None:
    say(tmp_path, 0, FINISHED)
    say(tmp_path, 1, FINISHED)
    found = watched(clock, tmp_path)
    assert found == Termination(
        "stalled", "timed_out", "all of this host's 2 ranks finished, but a process did not end within 0.2 s"
    )


def test_the_first_of_several_stalled_ranks_is_named(clock: SimpleNamespace, tmp_path: Path) -> None:
    found = watched(clock, tmp_path)
    assert found == Termination(
        "stalled", "timed_out", "rank 0 wrote nothing for 0.2 s, nor did 1 more of this host's 2 ranks"
    )


def test_output_of_the_launch_counts_as_activity_before_ranks_have_logs(clock: SimpleNamespace, tmp_path: Path) -> None:
    watch = LimitChecker(Limits(stall_timeout_s=0.2, min_free_mib=0.0), tmp_path, range(1), "start_pytorch_task.log")
    for _ in range(50):
        with (tmp_path / "start_pytorch_task.log").open("a") as file:
            file.write("building\n")
        assert watch.check() is None
        clock.at += 0.01
