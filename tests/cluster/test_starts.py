"""Starts that meet another coordinator, or one machine under two names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from tests.cluster.bed import Bed, run
from tests.cluster.conftest import done, drive, record_fault, statuses, stepping, stop
from tests.run.fakes import wait_for

pytestmark = pytest.mark.cluster
MakePlan = Callable[..., Plan]
SHORT = ("steps=40", "pace=0.05")


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
    assert any("is in progress, locked by process" in err for *_, err in ends), ends


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
