"""Faults on two hosts with real sshd's: how each run ends, how soon it is noticed, and what is left behind.

With ``ACCELMARK_FAULTS=FILE`` each fault is appended to a table.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.record.directory import RunDirectory
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, record_fault, refused, signalled, statuses, stepping
from tests.cluster.test_connections import drop_connections
from tests.run.fakes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.heavy]
MakePlan = Callable[..., Plan]
Inject = Callable[["Running"], None]

ENDLESS: Final = ("steps=100000", "pace=0.05")
SHORT: Final = ("steps=200", "pace=0.05")
CGROUP_V1: Final = Path("/sys/fs/cgroup/memory").is_dir()
MEMORY_GROUP: Final = Path("/sys/fs/cgroup", "memory" if CGROUP_V1 else "", f"accelmark-faults-{os.getpid()}")


@dataclass
class Running:
    """A run on the hosts n1 and n2 whose ranks take steps, and its coordinator."""

    bed: Bed
    run: Path
    coordinator: subprocess.Popen[str]

    def pids(self, text: str, host: str = "n2") -> list[int]:
        found = self.bed.processes().items()
        return [pid for pid, command in found if command.startswith(f"{host}:") and text in command]

    def signal(self, text: str, number: signal.Signals) -> None:
        pids = self.pids(text)
        assert pids, self.bed.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def node_dir(self) -> Path:
        """Return the job's directory on n2, where those of earlier runs are kept."""
        found = (self.bed.work(2) / "runs").glob("*/*/round1/n2_noderank1")
        return max(found, key=lambda path: path.stat().st_mtime)


@dataclass(frozen=True)
class Fault:
    """A fault, and how a run that it happens to has to end."""

    what: str
    state: str
    reason: str = ""
    """Part of the reason; empty where there is none."""
    inject: Inject | None = None
    """What happens while ranks take steps; None where the ranks' modes or the preparation is all."""
    modes: tuple[str, ...] = ENDLESS
    prepare: Callable[[Bed], None] = lambda _: None
    repair: Callable[[Bed], None] = lambda _: None
    on: Mapping[str, object] = field(default_factory=dict)
    """Settings of the cluster file."""
    warning: str = ""
    """Part of a warning in ``exit.json``."""
    disk_mib: int | None = None
    """Size of a file system of its own for the run's directory."""


def kill(text: str, number: signal.Signals = signal.SIGKILL) -> Inject:
    return lambda running: running.signal(text, number)


def paused(text: str, seconds: float) -> Inject:
    def inject(running: Running) -> None:
        running.signal(text, signal.SIGSTOP)
        time.sleep(seconds)
        running.signal(text, signal.SIGCONT)

    return inject


def unplugged(seconds: float) -> Inject:
    def inject(running: Running) -> None:
        running.bed.link(2, "down")
        time.sleep(seconds)
        running.bed.link(2, "up")

    return inject


def unplug(running: Running) -> None:
    running.bed.link(2, "down")


def plug_in(bed: Bed) -> None:
    bed.link(2, "up")


def pause_coordinator(running: Running) -> None:
    running.coordinator.send_signal(signal.SIGSTOP)
    time.sleep(5)
    running.coordinator.send_signal(signal.SIGCONT)


def replace_coordinator(running: Running) -> None:
    signalled(running.coordinator, signal.SIGKILL)
    running.coordinator = drive("resume", running.run)


def remove_log(running: Running) -> None:
    log = running.node_dir() / "rank1.out.log"
    wait_for(log.exists, "the log of rank 1")  # a step of rank 0 may come before
    log.unlink()


def remove_files(running: Running) -> None:
    shutil.rmtree(running.node_dir().parents[2])


def without_keys(bed: Bed) -> None:
    (bed.home(2) / "authorized_keys").write_text("")


def with_keys(bed: Bed) -> None:
    (bed.home(2) / "authorized_keys").write_text((bed.root / "key.pub").read_text())


def read_only(bed: Bed) -> None:
    subprocess.run(bed.inside(2, "mount", "-o", "remount,ro,bind", "/var/tmp/accelmark"), check=True)


def writable(bed: Bed) -> None:
    subprocess.run(bed.inside(2, "mount", "-o", "remount,rw,bind", "/var/tmp/accelmark"), check=True)


def full(bed: Bed) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/var/tmp/accelmark"]
    subprocess.run(bed.inside(2, *mount), check=True)
    subprocess.run(bed.inside(2, "dd", "if=/dev/zero", "of=/var/tmp/accelmark/ballast", "status=none"), check=False)


def not_full(bed: Bed) -> None:
    subprocess.run(bed.inside(2, "umount", "-l", "/var/tmp/accelmark"), check=True)


def limit_memory(bed: Bed) -> None:
    """Put n2's sshd, and thereby all that it starts, into a control group of 384 MiB."""
    MEMORY_GROUP.mkdir()
    (MEMORY_GROUP / ("memory.limit_in_bytes" if CGROUP_V1 else "memory.max")).write_text(str(384 << 20))
    (MEMORY_GROUP / "cgroup.procs").write_text((bed.home(2) / "sshd.pid").read_text())


def unlimit_memory(bed: Bed) -> None:
    for pid in (MEMORY_GROUP / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (MEMORY_GROUP.parent / "cgroup.procs").write_text(pid)
    MEMORY_GROUP.rmdir()


def stop_and_start_sshd(running: Running) -> None:
    running.bed.stop_sshd(2)
    time.sleep(3)
    running.bed.sshd(2)


def restart_sshd(running: Running) -> None:
    running.bed.stop_sshd(2)
    drop_connections(running.bed, 2)
    running.bed.sshd(2)
    wait_for((running.bed.home(2) / "sshd.pid").exists, "the new sshd")


def fill_coordinators_disk(running: Running) -> None:
    ballast = running.run.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    refused(running.coordinator, "ranks that were started continue", 1)
    assert running.pids("fake_rank.py")
    ballast.unlink()
    running.coordinator = drive("resume", running.run)


def close_terminal(running: Running) -> None:
    running.coordinator.send_signal(signal.SIGHUP)
    _, _, err = done(running.coordinator)
    assert "ranks that were started continue" in err, err
    running.coordinator = drive("resume", running.run)


def move_and_resume(running: Running) -> None:
    signalled(running.coordinator, signal.SIGKILL)
    running.run = running.run.rename(running.run.with_name("moved"))
    running.coordinator = drive("resume", running.run)


def copy_and_use(running: Running) -> None:
    copy = running.run.with_name("copy")
    shutil.copytree(running.run, copy)
    for verb in ("resume", "end"):
        refused(drive(verb, copy), f"is a copy of the run {running.run}")


FAULTS: Final = (
    Fault("a rank is killed", "failed", "rank 1", kill("fake_rank.py")),
    Fault("a rank crashes (SIGSEGV)", "failed", "rank 1", kill("fake_rank.py", signal.SIGSEGV)),
    Fault("a rank raises an error", "failed", "the flux is not conserved", modes=(*ENDLESS, "1:raise")),
    Fault("a rank exits with 0 before its end", "failed", "rank 1", modes=(*ENDLESS, "1:quit")),
    Fault("a rank's loss is NaN", "failed", "not finite", modes=(*ENDLESS, "1:nan")),
    Fault("a rank hangs", "timed_out", "rank 1", modes=(*ENDLESS, "1:hang")),
    Fault("a rank writes bytes that are no text", "succeeded", modes=(*SHORT, "1:noise")),
    Fault("a rank is stopped for 3 s", "succeeded", "", paused("fake_rank.py", 3), SHORT),
    Fault("a node agent is killed", "lost", "n2", kill("accelmark.run.agent.agent")),
    Fault("a node agent is stopped for 3 s", "succeeded", "", paused("accelmark.run.agent.agent", 3), SHORT),
    Fault(
        "a telemetry recorder is killed", "succeeded", "", kill("accelmark.telemetry.record"), SHORT, warning="recorder"
    ),
    Fault("the program that sends files is killed", "succeeded", "", kill("Programs that run on a host"), SHORT),
    Fault("sshd is stopped for 3 s", "succeeded", "", stop_and_start_sshd, SHORT),
    Fault("sshd is restarted", "succeeded", "", restart_sshd, SHORT),
    Fault("the network fails for 3 s", "succeeded", "", unplugged(3), SHORT),
    Fault("the network fails", "lost", "n2", unplug, repair=plug_in, on={"abandon_s": 20.0}),
    Fault("the coordinator is stopped for 5 s", "succeeded", "", pause_coordinator, SHORT),
    Fault("the coordinator is killed and the run resumed", "succeeded", "", replace_coordinator, SHORT),
    Fault("the terminal is closed and the run resumed", "succeeded", "", close_terminal, SHORT),
    Fault("the coordinator's disk is full", "succeeded", "", fill_coordinators_disk, SHORT, disk_mib=16),
    Fault("the run is moved and resumed", "succeeded", "", move_and_resume, SHORT),
    Fault("a copy of the run is resumed and stopped", "succeeded", "", copy_and_use, SHORT),
    Fault("a rank is killed by SIGBUS", "failed", "SIGBUS (shared memory", modes=(*ENDLESS, "1:bus")),
    Fault(
        "the kernel kills a rank for memory",
        "failed",
        "ut of memory: Killed process",
        modes=(*ENDLESS, "1:eat"),
        prepare=limit_memory,
        repair=unlimit_memory,
    ),
    Fault("the log of a rank is removed on its host", "failed", "without a FINISHED event", remove_log, SHORT),
    Fault("the run's directory on a host vanishes", "lost", "No such file or directory", remove_files),
    Fault("a host refuses the key", "failed", "n2", prepare=without_keys, repair=with_keys),
    Fault("the work directory is read-only", "failed", "mount it writable", prepare=read_only, repair=writable),
    Fault("a host's disk is full from the start", "failed", "the disk is full", prepare=full, repair=not_full),
    Fault("the hosts' Python is missing", "failed", "no-such-python", on={"python": "/opt/no-such-python"}),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_a_run_ends_right_and_leaves_nothing(fault: Fault, plan: MakePlan, bed: Bed, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    if fault.disk_mib is not None:
        size = f"size={fault.disk_mib}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(run.parent)], check=True)
    made = plan(fault.modes, num_hosts=2, on={"reconnect_s": 8.0, **fault.on}, stall_timeout_s=15.0)
    fault.prepare(bed)
    running = Running(bed, run, drive("start", run, plan=made))
    try:
        began = time.monotonic()
        if fault.inject is not None:
            wait_for(lambda: stepping(run), "a step")
            began = time.monotonic()
            fault.inject(running)
        _, out, err = done(running.coordinator)
        noticed_s = time.monotonic() - began
    except BaseException:
        signalled(running.coordinator, signal.SIGKILL)
        raise
    finally:
        fault.repair(bed)
    run = running.run
    (status,) = statuses(run)
    deadline = time.monotonic() + 60
    while (left := bed.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    expected = f"{fault.state}, names {fault.reason}" if fault.reason else fault.state
    record_fault(fault.what, expected, status, noticed_s if fault.state != "succeeded" else None, len(left))
    assert status.state == fault.state, f"{status}\n{out}{err}"
    assert fault.reason in (status.reason or ""), status
    assert not left
    if fault.warning:
        exits = [path.read_text() for path in run.glob("*/round1/*/exit.json")]
        assert any(fault.warning in text for text in exits), exits
    assert RunDirectory.open(run).events()
    if fault.disk_mib is not None:
        subprocess.run(["umount", "-l", str(run.parent)], check=True)
