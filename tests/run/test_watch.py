"""Limits of a running job: which rank fell silent, and which has only finished."""

from __future__ import annotations

import time
from pathlib import Path

from accelmark.run.task import Limits
from accelmark.run.watch import Breach, LimitWatch
from accelmark.spec.events import PERFLOG_PREFIX

FINISHED = PERFLOG_PREFIX + '{"event": "FINISHED", "value": {"state": "completed"}, "metadata": {"rank": 0}}\n'


def watched(node_dir: Path, *writing: int, seconds: float = 0.5) -> Breach | None:
    """Look for a while, during which the ranks ``writing`` go on with their logs."""
    watch = LimitWatch(Limits(stall_timeout_s=0.2, min_free_mib=0.0), node_dir, range(2), "start_pytorch_task.log")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in writing:
            say(node_dir, rank, "a step\n")
        breach = watch.look()
        if breach is not None:
            return breach
        time.sleep(0.01)
    return None


def say(node_dir: Path, rank: int, text: str) -> None:
    with (node_dir / f"rank{rank}.out.log").open("a") as file:
        file.write(text)


def test_a_rank_that_hangs_is_seen_while_another_still_writes(tmp_path: Path) -> None:
    say(tmp_path, 1, "a step\n")
    assert watched(tmp_path, 0) == Breach("stalled", "rank 1 wrote nothing for 0.2 s")


def test_ranks_that_write_and_ranks_that_have_finished_do_not_stall(tmp_path: Path) -> None:
    say(tmp_path, 0, FINISHED)
    assert watched(tmp_path, 1) is None


def test_where_all_fall_silent_the_first_is_named(tmp_path: Path) -> None:
    found = watched(tmp_path)
    assert found == Breach("stalled", "rank 0 wrote nothing for 0.2 s, nor did 1 more of this host's 2 ranks")


def test_a_launcher_that_still_prepares_the_ranks_is_a_sign_of_life(tmp_path: Path) -> None:
    watch = LimitWatch(Limits(stall_timeout_s=0.2, min_free_mib=0.0), tmp_path, range(1), "start_pytorch_task.log")
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        with (tmp_path / "start_pytorch_task.log").open("a") as file:
            file.write("building\n")
        assert watch.look() is None
        time.sleep(0.01)
