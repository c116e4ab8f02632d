"""Stalled jobs on several hosts: the rank that stopped first is named, or nobody is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.spec.job import NodeExit
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, statuses

ENDLESS = "steps=100000"
MakePlan = Callable[..., Plan]

pytestmark = pytest.mark.cluster


def stalled(plan: Plan, run: Path) -> tuple[str, list[NodeExit]]:
    code, out, err = done(drive("start", run, plan=plan))
    (status,) = statuses(run)
    assert (code, status.state) == (1, "timed_out"), out + err + str(status)
    exits = [NodeExit.model_validate_json(path.read_bytes()) for path in sorted(run.glob("*/round1/*/exit.json"))]
    return status.reason or "", exits


def test_a_stopped_process_on_another_host_is_named_not_rank_0(plan: MakePlan, tmp_path: Path) -> None:
    made = plan((ENDLESS, "0:hang", "1:halt"), num_hosts=2, stall_timeout_s=6.0)
    reason, exits = stalled(made, tmp_path / "run")
    assert reason.startswith("n2: rank 1 stopped first: its process is stopped (state T"), reason
    ranks = [rank for node in exits if node.stall is not None for rank in node.stall.ranks]
    assert [(rank.rank, rank.process_state, rank.last_step) for rank in ranks] == [(0, "S", 2), (1, "T", 2)]
    assert any("in misbehave" in frame for frame in ranks[0].stack), ranks[0]


def test_full_shared_memory_is_named(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=4m none /dev/shm; head -c 4M /dev/zero > /dev/shm/ballast"
    subprocess.run(bed.inside(2, "sh", "-c", fill), check=True)
    try:
        reason, _ = stalled(plan((ENDLESS, "1:hang"), num_hosts=2, stall_timeout_s=6.0), tmp_path / "run")
    finally:
        subprocess.run(bed.inside(2, "umount", "-l", "/dev/shm"), check=True)
    assert reason.startswith("n2: rank 1 wrote no event for 6 s; it was at "), reason
    assert "; /dev/shm is full (0.0 of 4 MiB free) on n2" in reason, reason


def test_where_nothing_singles_out_a_rank_it_is_unknown(plan: MakePlan, tmp_path: Path) -> None:
    reason, exits = stalled(plan((ENDLESS, "hang"), num_hosts=2, stall_timeout_s=6.0), tmp_path / "run")
    assert reason.startswith("which rank stopped first is unknown"), reason
    assert all(node.stall is not None and node.stall.ranks[0].stack for node in exits), exits
