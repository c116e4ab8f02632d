"""Which rank of a stalled job is named, by the evidence of all hosts."""

from __future__ import annotations

import pytest

from accelmark.run.controller.execution import stall_cause
from accelmark.spec.job import LastCollective, NodeExit, RankStall, StallRecord

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
    """Return the cause of a stall of ranks on a host each."""
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
        (
            (rank(0, stack=LOADS[1:]), rank(1, stack=LOADS), rank(2, stack=LOADS[1:])),
            "n1: rank 1 stopped first: all others are in another function",
        ),
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
