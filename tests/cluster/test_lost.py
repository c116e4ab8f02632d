"""Agents without a coordinator: on a lost host, or after the coordinator died."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, on_first_host_only, statuses, stepping
from tests.run.fakes import wait_for

ENDLESS = "steps=100000"
MakePlan = Callable[..., Plan]

pytestmark = pytest.mark.cluster


def alive(bed: Bed, number: int, case: str) -> bool:
    """Tell whether an agent of a case lives on a host."""
    return any(
        line.startswith(f"n{number}: ") and "accelmark.run.agent" in line and f"/{case}-" in line
        for line in bed.processes().values()
    )


def test_agents_on_a_lost_host_are_ended_once_it_can_be_reached(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = plan((ENDLESS, "pace=0.1"), (ENDLESS, "pace=0.1"), num_hosts=2, on={"reconnect_s": 3.0})
    process = drive("start", run, plan=on_first_host_only(made, 1))
    wait_for(lambda: stepping(run), "a step that came home")
    bed.link(2, "down")
    try:
        wait_for(lambda: [status.state for status in statuses(run)] == ["lost", "running"], "the other case", 90)
        assert alive(bed, 2, "toy0"), "an unreachable host"
    finally:
        bed.link(2, "up")
    wait_for(lambda: not alive(bed, 2, "toy0"), "the end of what was given up", 90)
    wait_for(lambda: list(run.glob("toy1*/round1/*/rank0.out.log")), "a step of the other case")
    assert statuses(run)[1].state == "running"
    process.send_signal(signal.SIGINT)
    done(process)
    first, second = statuses(run)
    assert (first.state, second.state) == ("lost", "cancelled")
    assert "processes still running there are ended once it can be reached" in (first.reason or "")


def test_stop_ends_agents_on_a_lost_host_after_the_run(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan((ENDLESS, "pace=0.1"), on={"reconnect_s": 2.0}))
    wait_for(lambda: stepping(run), "a step that came home")
    bed.link(1, "down")
    try:
        code, _, _ = done(process, 90)
        still_away = done(drive("end", run))
    finally:
        bed.link(1, "up")
    assert (code, statuses(run)[0].state) == (1, "lost")
    assert still_away[0] == 1
    assert "agents there end by themselves after 24 h 00 m without a coordinator" in still_away[2]
    assert alive(bed, 1, "toy0")
    assert done(drive("end", run))[0] == 0
    assert not alive(bed, 1, "toy0")


def elsewhere(boot_id: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on another login node that shares the directories: another boot, another name."""
    boot_id.write_text(f"{uuid.uuid4()}\n")
    script = 'mount --bind "$1" /proc/sys/kernel/random/boot_id; hostname login2; shift; exec "$@"'
    argv = ["unshare", "-m", "-u", "sh", "-c", script, "sh", str(boot_id), *command]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_status_and_stop_work_from_another_login_node(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan((ENDLESS, "pace=0.1"), ()))
    wait_for(lambda: stepping(run), "a step that came home")
    seen = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "status", str(run))
    assert f"Coordinator: process {process.pid} on {socket.gethostname()}." in seen.stdout, seen
    resumed = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "resume", str(run))
    assert f"locked by process {process.pid} on {socket.gethostname()}" in resumed.stderr, resumed
    stopped = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "stop", str(run))
    assert stopped.returncode == 0, stopped
    code, out, err = done(process)
    assert (code, [status.state for status in statuses(run)]) == (130, ["cancelled", "cancelled"]), out + err
    assert "was stopped from another machine" in (statuses(run)[0].reason or "")


def test_a_copy_on_another_machine_takes_no_job_over_while_the_original_follows_it(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    process = drive("start", run, plan=plan((ENDLESS, "pace=0.1"), num_hosts=2))
    wait_for(lambda: stepping(run), "a step that came home")
    shutil.copytree(run, copy)

    def with_copy(verb: str) -> subprocess.CompletedProcess[str]:
        state = f"ACCELMARK_STATE={tmp_path / 'state'}"  # another machine has another registry
        return elsewhere(tmp_path / "boot", "env", state, sys.executable, "-m", "accelmark", verb, str(copy))

    where = f"another coordinator follows this run, from {socket.gethostname()}:{run}: use that directory"
    for verb in ("resume", "stop"):
        refused = with_copy(verb)
        assert (refused.returncode, where in refused.stderr) == (2, True), refused
    assert (process.poll(), statuses(run)[0].state) == (None, "running")
    assert statuses(copy)[0].state == "running"
    process.kill()
    done(process)
    stopped = with_copy("stop")  # as after a move to another machine
    assert (stopped.returncode, statuses(copy)[0].state) == (0, "cancelled"), stopped
    assert not bed.processes()


def test_a_job_without_coordinator_heartbeats_ends_and_is_redone(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = drive("start", run, plan=plan((ENDLESS, "first=hang"), num_hosts=2, on={"abandon_s": 8.0}))
    wait_for(lambda: stepping(run), "a step that came home")
    process.send_signal(signal.SIGKILL)
    done(process)
    wait_for(lambda: not bed.processes(), "the end of the agent", 60)
    process = drive("resume", run)
    wait_for(lambda: statuses(run)[0].attempt == 2 and stepping(run), "the second attempt", 60)
    process.send_signal(signal.SIGINT)
    done(process)
    ended = next(run.glob("*/round1/attempt1/n1_noderank0/exit.json")).read_text()
    assert "no coordinator heartbeat for 8 s" in ended


def test_a_job_with_coordinator_heartbeats_does_not_end(plan: MakePlan, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = done(drive("start", run, plan=plan(("steps=120", "pace=0.1"), on={"abandon_s": 8.0})))
    assert (code, statuses(run)[0].state) == (0, "succeeded"), out + err + str(statuses(run))
