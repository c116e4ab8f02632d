"""Lost connections, changed host keys, rebooted hosts, starts that fail, and agents without a coordinator."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.spec.job import NodeExit
from tests.cluster.bed import Bed, run
from tests.cluster.conftest import on_first_host_only, record_fault
from tests.run.fakes import wait_for
from tests.run.test_session import done, drive, ends, running, signalled, statuses, stepping

ENDLESS = "steps=100000"
MakePlan = Callable[..., Plan]

pytestmark = pytest.mark.cluster


@contextlib.contextmanager
def bound(bed: Bed, number: int, source: Path, target: str) -> Iterator[None]:
    subprocess.run(bed.inside(number, "mount", "--bind", str(source), target), check=True)
    try:
        yield
    finally:
        subprocess.run(bed.inside(number, "umount", target), check=True)


def drop_connections(bed: Bed, number: int) -> None:
    """Kill the processes of a host's sshd that serve connections; commands without a terminal continue."""
    pid_file = bed.home(number) / "sshd.pid"
    listener = pid_file.read_text().strip() if pid_file.exists() else ""
    for pid in run("ip", "netns", "pids", bed.namespace(number)).split():
        with contextlib.suppress(OSError):
            if pid != listener and Path(f"/proc/{pid}/comm").read_text().strip().startswith("sshd"):
                os.kill(int(pid), signal.SIGKILL)


def test_a_start_that_fails_on_one_host_ends_the_agents_of_the_others(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    mkdir, real = tmp_path / "mkdir", tmp_path / "real-mkdir"
    shutil.copy("/usr/bin/mkdir", real)
    full = 'case "$*" in .started) echo "mkdir: No space left on device" >&2; exit 1;; esac'
    mkdir.write_text(f'#!/bin/sh\n{full}\nexec {real} "$@"\n')
    mkdir.chmod(0o755)
    directory = tmp_path / "run"
    with bound(bed, 2, mkdir, "/usr/bin/mkdir"):
        (status,) = ends(drive("start", directory, plan=plan((ENDLESS,), num_hosts=3)), directory, 1, "failed")
    assert (status.reason or "").startswith("n2: the node agent could not be started: mkdir: No space left on device")
    assert "free space there" in (status.reason or "")
    wait_for(lambda: not bed.processes(), "the end of the agents on the other hosts", 30)


def test_a_connection_that_is_lost_while_a_host_is_prepared_is_opened_again(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    directory, python, begun = tmp_path / "run", tmp_path / "python", tmp_path / "begun"
    slow = f'case "$*" in *" files") [ -e {begun} ] || {{ touch {begun}; sleep 600; }};; esac'
    python.write_text(f'#!/bin/sh\n{slow}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    process = drive("start", directory, plan=plan((), on={"python": str(python)}))
    wait_for(begun.exists, "the preparation")
    drop_connections(bed, 1)
    for pid, line in bed.processes().items():
        if "sleep 600" in line:
            os.kill(pid, signal.SIGKILL)
    (status,) = ends(process, directory, 0, "succeeded")
    record_fault("the connection is lost while a host is prepared", "succeeded", status)
    assert status.attempt == 1


def test_later_rounds_wait_for_another_run_that_has_taken_a_host(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    directory, lock = tmp_path / "run", "\\0accelmark-host"
    process = running(directory, plan(("steps=60", "pace=0.05"), ()))
    body = f"""
import socket, time
lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    try:
        lock.bind("{lock}")
        break
    except OSError:
        time.sleep(0.001)
time.sleep(6)
"""
    other = subprocess.Popen(bed.enter(1, sys.executable, "-c", body))
    _, last = ends(process, directory, 0, "succeeded", "succeeded")
    assert (other.wait(60), last.attempt) == (0, 1)
    record_fault("another run takes a host between two rounds", "succeeded, waits", last)
    second = NodeExit.model_validate_json(next(directory.glob("toy1*/round1/*/exit.json")).read_bytes())
    assert second.duration_s > 5, "it waited"


def test_a_reboot_is_named(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    directory, boot_id = tmp_path / "run", tmp_path / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    process = running(directory, plan((ENDLESS, "pace=0.1"), num_hosts=2, on={"reconnect_s": 60.0}))
    bed.link(2, "down")
    with bound(bed, 2, boot_id, "/proc/sys/kernel/random/boot_id"):
        for pid, line in bed.processes().items():
            if line.startswith("n2: "):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        drop_connections(bed, 2)
        bed.link(2, "up")
        (status,) = ends(process, directory, 1, "lost")
    assert (status.reason or "").startswith("n2: "), status
    assert "the host was rebooted while the job ran" in (status.reason or "")


def test_a_host_key_that_changes_during_a_run_ends_the_job_at_once(plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    directory, key = tmp_path / "run", bed.home(1) / "host_key"
    made = plan((ENDLESS, "pace=0.1"), on={"reconnect_s": 10000.0})
    process = running(directory, made)
    old = key.read_bytes(), key.with_suffix(".pub").read_bytes()
    try:
        bed.stop_sshd(1)
        key.unlink()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        bed.sshd(1)
        wait_for((bed.home(1) / "sshd.pid").exists, "the new sshd")
        drop_connections(bed, 1)
        (status,) = ends(process, directory, 1, "lost")
    finally:
        bed.stop_sshd(1)
        key.write_bytes(old[0])
        key.with_suffix(".pub").write_bytes(old[1])
        bed.sshd(1)
    assert (status.reason or "").startswith("its host key has changed: "), status
    wait_for((bed.home(1) / "sshd.pid").exists, "the old sshd")
    assert done(drive("end", directory))[0] == 0


def alive(bed: Bed, number: int, case: str) -> bool:
    return any(
        line.startswith(f"n{number}: ") and "accelmark.run.agent" in line and f"/{case}-" in line
        for line in bed.processes().values()
    )


def test_agents_on_a_lost_host_are_ended_once_it_can_be_reached(plan: MakePlan, bed: Bed, run: Path) -> None:
    made = plan((ENDLESS, "pace=0.1"), (ENDLESS, "pace=0.1"), num_hosts=2, on={"reconnect_s": 3.0})
    process = running(run, on_first_host_only(made, 1))
    bed.link(2, "down")
    try:
        wait_for(lambda: [status.state for status in statuses(run)] == ["lost", "running"], "the other case", 90)
        assert alive(bed, 2, "toy0"), "an unreachable host"
    finally:
        bed.link(2, "up")
    wait_for(lambda: not alive(bed, 2, "toy0"), "the end of what was given up", 90)
    wait_for(lambda: list(run.glob("toy1*/round1/*/rank0.out.log")), "a step of the other case")
    assert statuses(run)[1].state == "running"
    signalled(process)
    first, second = statuses(run)
    assert (first.state, second.state) == ("lost", "cancelled")
    assert "processes still running there are ended once it can be reached" in (first.reason or "")


def test_stop_ends_agents_on_a_lost_host_after_the_run(plan: MakePlan, bed: Bed, run: Path) -> None:
    process = running(run, plan((ENDLESS, "pace=0.1"), on={"reconnect_s": 2.0}))
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


def test_status_and_stop_work_from_another_login_node(plan: MakePlan, run: Path, tmp_path: Path) -> None:
    process = running(run, plan((ENDLESS, "pace=0.1"), ()))
    seen = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "status", str(run))
    assert f"Coordinator: process {process.pid} on {socket.gethostname()}." in seen.stdout, seen
    resumed = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "resume", str(run))
    assert f"locked by process {process.pid} on {socket.gethostname()}" in resumed.stderr, resumed
    stopped = elsewhere(tmp_path / "boot", sys.executable, "-m", "accelmark", "stop", str(run))
    assert stopped.returncode == 0, stopped
    ends(process, run, 130, "cancelled", "cancelled")
    assert "was stopped from another machine" in (statuses(run)[0].reason or "")


def test_a_copy_on_another_machine_takes_no_job_over_while_the_original_follows_it(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    process = running(run, plan((ENDLESS, "pace=0.1"), num_hosts=2))
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
    signalled(process, signal.SIGKILL)
    stopped = with_copy("stop")  # as after a move to another machine
    assert (stopped.returncode, statuses(copy)[0].state) == (0, "cancelled"), stopped
    assert not bed.processes()


def test_a_job_without_coordinator_heartbeats_ends_and_is_redone(plan: MakePlan, bed: Bed, run: Path) -> None:
    process = running(run, plan((ENDLESS, "first=hang"), num_hosts=2, on={"abandon_s": 8.0}))
    signalled(process, signal.SIGKILL)
    wait_for(lambda: not bed.processes(), "the end of the agent", 60)
    process = drive("resume", run)
    wait_for(lambda: statuses(run)[0].attempt == 2 and stepping(run), "the second attempt", 60)
    signalled(process)
    ended = next(run.glob("*/round1/attempt1/n1_noderank0/exit.json")).read_text()
    assert "no coordinator heartbeat for 8 s" in ended


def test_a_job_with_coordinator_heartbeats_does_not_end(plan: MakePlan, run: Path) -> None:
    ends(drive("start", run, plan=plan(("steps=120", "pace=0.1"), on={"abandon_s": 8.0})), run, 0, "succeeded")
