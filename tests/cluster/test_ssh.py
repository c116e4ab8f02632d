"""Runs over SSH on hosts with real sshds: starts, ends, faults, stalls, killed coordinators, and shared directories."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelmark.audit.verify import verify_run
from accelmark.plan.plan import Plan
from accelmark.results.store.bundle import check_manifest
from accelmark.run.controller.coordinator import stop
from accelmark.run.host import HostError
from accelmark.run.launchers.ssh import launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.job import NodeExit
from tests.cluster.bed import Bed, run
from tests.cluster.conftest import on_first_host_only, record_fault
from tests.run.fakes import make_plan, wait_for
from tests.run.test_session import done, drive, ends, running, signalled, statuses, stepping

ENDLESS = "steps=100000"
MakePlan = Callable[..., Plan]

pytestmark = pytest.mark.cluster


def test_a_job_on_four_hosts_succeeds_and_its_files_are_copied(plan: MakePlan, run: Path) -> None:
    ends(drive("start", run, plan=plan((), num_hosts=4, log_level="debug")), run, 0, "succeeded")
    for number in range(1, 5):
        node = run / "toy0-bare-X1x4x1" / "round1" / f"n{number}_noderank{number - 1}"
        expected = {"agent.json", "exit.json", "sys_info.json", f"rank{number - 1}.out.log", "start_bare_task.log"}
        assert expected <= {path.name for path in node.iterdir()}
    found = verify_run(run)
    assert (found.changed, found.differences) == ((), ())
    log = run / "coordinator.log"
    assert "Closing connection" in log.read_text(), "written after all was summed up"


def test_binary_output_is_copied_byte_for_byte(plan: MakePlan, run: Path) -> None:
    ends(drive("start", run, plan=plan(("noise",), ())), run, 0, "succeeded", "succeeded")
    log = next(run.glob("*/round1/n1_noderank0/rank0.out.log")).read_bytes()
    assert bytes(range(256)) * 40 + b"\n\xff\xfe\x1b[2J\x00 not text\n" in log


def test_files_in_subdirectories_are_copied_and_large_ones_listed(plan: MakePlan, run: Path) -> None:
    ends(drive("start", run, plan=plan(("nested",))), run, 0, "succeeded")
    node = next(run.glob("*/round1/n1_noderank0"))
    assert (node / "trace" / "of rank 0" / "profile.json").read_text() == "[1, 2]"
    left = json.loads((node / "left_on_host.json").read_text())
    assert (left["host"], left["bytes"]) == ("n1", {"trace/of rank 0/memory.bin": 40 << 20})
    assert left["directory"].startswith("/var/tmp/accelmark/runs/run-")


def test_old_runs_are_removed_from_hosts(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    runs = bed.work(1) / "runs"
    for name, age_days in (("old", 15), ("recent", 13)):
        inner = runs / name / "case" / "round1"
        inner.mkdir(parents=True)
        for place in (inner, inner.parent, runs / name):
            os.utime(place, (time.time() - age_days * 86400,) * 2)
    ends(drive("start", tmp_path / "run", plan=plan(())), tmp_path / "run", 0, "succeeded")
    assert not (runs / "old").exists()
    assert (runs / "recent" / "case").exists()


def test_a_full_disk_on_one_host_fails_the_job(plan: MakePlan, bed: Bed, run: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "none", "/var/tmp/accelmark"]
    subprocess.run(bed.inside(2, *mount), check=True)
    try:
        made = plan((ENDLESS, "1:fill", "pace=0.2"), (), num_hosts=2)
        done(drive("start", run, plan=on_first_host_only(made, 1)))
    finally:
        subprocess.run(bed.inside(2, "umount", "-l", "/var/tmp/accelmark"), check=True)
    reason = statuses(run)[0].reason or ""
    record_fault("a rank fills a host's disk", "failed, names n2", statuses(run)[0])
    assert [status.state for status in statuses(run)] == ["failed", "succeeded"]
    assert reason.startswith("n2: ")
    assert "No space left on device" in reason or "are free on the disk of" in reason


def test_only_a_job_that_was_started_is_resumed_from_checkpoints(plan: MakePlan, run: Path) -> None:
    process = running(run, plan(("steps=120", "pace=0.05"), (), num_hosts=2))
    assert signalled(process)[0] == 130
    code, out, err = done(drive("resume", run))
    assert (code, [status.attempt for status in statuses(run)]) == (0, [2, 2]), out + err
    jobs = [json.loads((run / job / "job.json").read_text()) for job in RunDirectory.open(run).statuses()]
    assert [job["resume"] for job in jobs] == [True, False]


def test_ctrl_c_leaves_nothing_on_any_host(plan: MakePlan, run: Path) -> None:
    process = running(run, plan((ENDLESS, "grandchild"), (), num_hosts=2))
    ends(process, run, 130, "cancelled", "cancelled", by=signal.SIGINT)
    assert check_manifest(run) == []


def stalled(plan: Plan, run: Path) -> tuple[str, list[NodeExit]]:
    (status,) = ends(drive("start", run, plan=plan), run, 1, "timed_out")
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


SHORT = ("steps=40", "pace=0.05")


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[Path]:
    """Mount a small file system and fill it; yields the file that fills it."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True)
    ballast = place / "ballast"
    try:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield ballast
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_full_at_the_start_leaves_no_directory(plugins: Path, tmp_path: Path) -> None:
    directory = tmp_path / "disk" / "run"
    (tmp_path / "run").symlink_to(directory)  # the plan's file is beside it, on another disk
    with full_disk(tmp_path / "disk") as ballast:
        code, _, err = done(drive("start", tmp_path / "run", plan=make_plan(())))
        assert (code, "the disk is full" in err, directory.exists()) == (1, True, False), err
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(directory.parent)], check=True)
        ends(drive("start", tmp_path / "run", plan=make_plan(())), directory, 0, "succeeded")


def handles_hang_up(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (signal.SIGHUP - 1) & 1)


def test_a_terminal_that_is_closed_before_anything_started_leaves_no_directory(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    bed.link(1, "down")
    try:
        process = drive("start", directory, "--look", plan=plan(()))
        wait_for(lambda: handles_hang_up(process.pid), "the preflight")
        process.send_signal(signal.SIGHUP)
        code, _, err = done(process)
    finally:
        bed.link(1, "up")
    assert (code, "closed before anything was started" in err, directory.exists()) == (130, True, False), err


def test_of_two_coordinators_at_once_one_starts_or_resumes_a_run(plan: MakePlan, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    ends = [done(process) for process in [drive("start", directory, plan=plan(SHORT)) for _ in range(2)]]
    record_fault("two coordinators start one run at once", "succeeded, one is refused", statuses(directory)[0])
    assert sorted(code for code, *_ in ends) == [0, 2], ends
    assert statuses(directory)[0].state == "succeeded"
    second = tmp_path / "second"
    process = drive("start", second, plan=plan(("steps=100000", "pace=0.1")))
    wait_for(lambda: stepping(second), "a step")
    signalled(process, signal.SIGKILL)
    resumed = [drive("resume", second) for _ in range(2)]
    wait_for(lambda: any(each.poll() is not None for each in resumed), "the refusal")
    time.sleep(1)
    assert [each.poll() for each in resumed].count(None) == 1
    assert stop(second, at_once=False)
    ends = [done(process) for process in resumed]
    assert sorted(code for code, *_ in ends) == [2, 130], ends
    assert any("is in progress, locked by" in err and "stop it with" in err for *_, err in ends), ends


@pytest.mark.parametrize("look", [True, False])
def test_a_machine_under_two_names_is_one_host(plan: MakePlan, bed: Bed, tmp_path: Path, look: bool) -> None:
    other, known = f"{bed.net}.101", bed.root / "known_hosts"
    hosts = [{"address": bed.address(1), "label": "a"}, {"address": other, "label": "b"}]
    keys = known.read_text()
    known.write_text(keys + keys.splitlines()[0].replace(bed.address(1), other) + "\n")
    run("ip", "-n", bed.namespace(1), "addr", "add", f"{other}/24", "dev", "eth0")
    try:
        made = plan(SHORT, num_hosts=2, on={"hosts": hosts})
        code, out, err = done(drive("start", tmp_path / "run", *(["--look"] if look else []), plan=made))
    finally:
        run("ip", "-n", bed.namespace(1), "addr", "del", f"{other}/24", "dev", "eth0")
        known.write_text(keys)
    assert code == 1, out + err
    if look:
        assert "b: is the same machine as a (list each host once)" in err
        assert not (tmp_path / "run").exists()
    else:
        assert "the host is in use by run-" in (statuses(tmp_path / "run")[0].reason or "")


def test_hosts_write_to_a_shared_run_directory_also_when_it_is_resumed(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    run = tmp_path / "shared" / "runs" / "one"
    before = {path.name for path in bed.work(1).glob("runs/*")}
    made = plan(("steps=120", "pace=0.05"), ("1:die",), num_hosts=2, on={"shared_directory": str(tmp_path / "shared")})
    run.parent.mkdir(parents=True)
    process = running(run, made)
    signalled(process, signal.SIGKILL)
    first, second = ends(drive("resume", run), run, 1, "succeeded", "failed")
    assert first.attempt == 1
    assert (second.reason or "").startswith("n2: rank 1: killed by SIGKILL")
    node = run / "toy0-bare-X1x2x1" / "round1" / "n2_noderank1"
    assert json.loads((node / "agent.json").read_text())["job_file"] == str(node.parent / "job.hosts.json")
    assert (node / "agent.lock").exists(), "the agent's own directory, not a copy"
    assert (node / "rank1.out.log").read_text().count('"STEP_END"') == 120
    assert len(list((tmp_path / "shared" / "accelmark" / "code").glob("accelmark-*"))) == 1
    assert {path.name for path in bed.work(1).glob("runs/*")} == before


def test_a_directory_that_is_not_shared_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_SETTLE_S", 0.3)
    with pytest.raises(HostError, match=r"n1: .*agent\.json, which it wrote, is not visible here: shared_directory"):
        asyncio.run(launcher.wait_until_visible("n1", tmp_path / "agent.json", "0" * 64))
