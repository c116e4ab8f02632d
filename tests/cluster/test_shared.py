"""Hosts that share a directory: they write a run's files there, and nothing is copied."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.host import HostError
from accelmark.run.launchers.ssh import agent
from tests.cluster.bed import Bed
from tests.cluster.conftest import done, drive, statuses, stepping
from tests.run.fakes import wait_for

pytestmark = pytest.mark.cluster
MakePlan = Callable[..., Plan]


def test_hosts_write_to_a_shared_run_directory_also_when_it_is_resumed(
    plan: MakePlan, bed: Bed, tmp_path: Path
) -> None:
    run = tmp_path / "shared" / "runs" / "one"
    before = {path.name for path in bed.work(1).glob("runs/*")}
    made = plan(("steps=120", "pace=0.05"), ("1:die",), num_hosts=2, on={"shared_directory": str(tmp_path / "shared")})
    run.parent.mkdir(parents=True)
    process = drive("start", run, plan=made)
    wait_for(lambda: stepping(run), "a step")
    process.send_signal(signal.SIGKILL)
    done(process)
    code, out, err = done(drive("resume", run))
    first, second = statuses(run)
    assert (code, first.state, first.attempt, second.state) == (1, "succeeded", 1, "failed"), f"{out}{err}{first}"
    assert (second.reason or "").startswith("n2: rank 1: killed by SIGKILL")
    node = run / "toy0-bare-X1x2x1" / "round1" / "n2_noderank1"
    assert json.loads((node / "agent.json").read_text())["job_file"] == str(node.parent / "job.hosts.json")
    assert (node / "agent.lock").exists(), "the agent's own directory, not a copy"
    assert (node / "rank1.out.log").read_text().count('"STEP_END"') == 120
    assert len(list((tmp_path / "shared" / "accelmark" / "code").glob("accelmark-*"))) == 1
    assert {path.name for path in bed.work(1).glob("runs/*")} == before


def test_a_directory_that_is_not_shared_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_SETTLE_S", 0.3)
    with pytest.raises(HostError, match=r"n1: .*agent\.json, which it wrote, is not visible here: shared_directory"):
        asyncio.run(agent.wait_until_visible("n1", tmp_path / "agent.json", "0" * 64))
