"""Runs over SSH on hosts with real sshd's: ends, faults, death of the coordinator, resumption."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, statuses, stepping
from tests.run.fakes import wait_for

ENDLESS = "steps=100000"
MakePlan = Callable[..., Plan]

pytestmark = pytest.mark.cluster


def test_a_job_on_two_hosts_succeeds_and_its_files_are_home(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = done(drive("start", run, plan=plan((), num_hosts=2)))
    assert (code, [status.state for status in statuses(run)]) == (0, ["succeeded"]), (
        out + err + str([status.reason for status in statuses(run)])
    )
    for number in (1, 2):
        node = run / "toy0-pytorch-X1x2x1" / "round1" / f"n{number}_noderank{number - 1}"
        expected = {"agent.json", "exit.json", "sys_info.json", f"rank{number - 1}.out.log", "start_pytorch_task.log"}
        assert expected <= {path.name for path in node.iterdir()}
    assert (run / "summary.json").exists()


def test_one_dead_rank_ends_the_job_on_all_hosts_and_the_next_case_goes_on(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = done(drive("start", run, plan=plan((ENDLESS, "1:die"), (), num_hosts=2)))
    first, second = statuses(run)
    assert (code, first.state, second.state) == (1, "failed", "succeeded"), out + err
    assert first.reason == "n2: rank 1: killed by SIGKILL (often the kernel's out-of-memory killer: see dmesg)"


def test_a_rank_that_hangs_ends_the_job_as_timed_out(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done(drive("start", run, plan=plan((ENDLESS, "1:hang"), num_hosts=2, stall_timeout_s=1.5)))
    (status,) = statuses(run)
    assert (status.state, status.reason) == ("timed_out", "n2: no rank of this host wrote anything for 1.5 s")


def test_binary_noise_comes_home_byte_for_byte(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done(drive("start", run, plan=plan(("noise",))))
    assert statuses(run)[0].state == "succeeded"
    log = next(run.glob("*/round1/n1_noderank0/rank0.out.log")).read_bytes()
    assert bytes(range(256)) * 40 + b"\n\xff\xfe\x1b[2J\x00 not text\n" in log


def test_a_short_loss_of_the_link_changes_nothing(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan(("steps=250", "pace=0.05"), on={"reconnect_s": 12.0}))
    wait_for(lambda: stepping(run), "a step that came home")
    bed.link(1, "down")
    try:
        with pytest.raises(Exception, match="timed out"):
            process.wait(8)
    finally:
        bed.link(1, "up")
    code, out, err = done(process)
    assert (code, statuses(run)[0].state) == (0, "succeeded"), out + err + str(statuses(run))
    log = next(run.glob("*/round1/n1_noderank0/rank0.out.log")).read_text()
    assert log.count('"STEP_END"') == 250


def test_a_host_that_stays_away_is_lost_and_its_job_is_done_again(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = plan((ENDLESS, "1:pace=0.1"), ("0:x",), num_hosts=2, on={"reconnect_s": 3.0})
    process = drive("start", run, plan=made)
    wait_for(lambda: stepping(run), "a step that came home")
    bed.link(2, "down")
    try:
        wait_for(lambda: statuses(run)[0].ended, "the end of the job", 60)
    finally:
        bed.link(2, "up")
    code, _, _ = done(process)
    first, second = statuses(run)
    assert (code, first.state) == (1, "lost")
    assert "n2: was out of reach for" in (first.reason or "")
    assert second.state in ("failed", "succeeded")


def test_a_killed_coordinator_is_resumed_and_the_agents_went_on(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan(("steps=120", "pace=0.05"), (), num_hosts=2))
    wait_for(lambda: stepping(run), "a step that came home")
    process.send_signal(signal.SIGKILL)
    done(process)
    code, out, err = done(drive("resume", run))
    assert (code, [status.state for status in statuses(run)]) == (0, ["succeeded", "succeeded"]), out + err
    assert [status.attempt for status in statuses(run)] == [1, 1]
    log = next(run.glob("toy0*/round1/n1_noderank0/rank0.out.log")).read_text()
    assert log.count('"STEP_END"') == 120


def test_stop_ends_a_run_whose_coordinator_is_dead(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan((ENDLESS,), num_hosts=2))
    wait_for(lambda: stepping(run), "a step that came home")
    process.send_signal(signal.SIGKILL)
    done(process)
    code, out, err = done(drive("end", run))
    assert (code, statuses(run)[0].state) == (0, "cancelled"), out + err


def test_ctrl_c_leaves_nothing_on_any_host(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan((ENDLESS, "grandchild"), (), num_hosts=2))
    wait_for(lambda: stepping(run), "a step that came home")
    process.send_signal(signal.SIGINT)
    code, *_ = done(process)
    assert (code, [status.state for status in statuses(run)]) == (130, ["cancelled", "cancelled"])
