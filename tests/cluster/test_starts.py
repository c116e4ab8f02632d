"""Starts that meet a full disk, another coordinator, a closed terminal, or one machine under two names."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from tests.cluster.bed import Bed, run
from tests.cluster.conftest import done, drive, record_fault, statuses, stepping, stop
from tests.run.fakes import make_plan, wait_for

pytestmark = pytest.mark.cluster
MakePlan = Callable[..., Plan]
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
        code, out, err = done(drive("start", tmp_path / "run", plan=make_plan(())))
        assert (code, statuses(directory)[0].state) == (0, "succeeded"), out + err


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
    process.kill()
    process.communicate()
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
