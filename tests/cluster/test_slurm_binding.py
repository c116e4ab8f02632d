"""A Slurm that binds steps to cores and devices: ranks have all cores of their nodes, and the requested devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelmark.spec.cluster import ClusterSpec
from tests.cluster.conftest import done, drive, statuses
from tests.cluster.slurm import slurm
from tests.run.fakes import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def slurm_conf() -> Iterator[str]:
    with slurm(binds=True) as file:
        yield file


def placed(run: Path, *options: str) -> list[str]:
    """Run a job on two nodes; returns what each rank printed about its place."""
    values = {
        "name": "slurm", "launcher": "slurm", "hosts": [{"address": "n1"}, {"address": "n2"}],
        "python": sys.executable, "slurm_options": options,
    }  # fmt: skip
    plan = make_plan(("place",), hosts=("n1", "n2"), cluster=ClusterSpec.model_validate(values))
    _, out, err = done(drive("start", run, plan=plan))
    assert [status.state for status in statuses(run)] == ["succeeded"], out + err + str(statuses(run))
    logs = sorted(run.glob("*/round1/*/rank*.out.log"))
    return [line for log in logs for line in log.read_text().splitlines() if line.startswith("cores ")]


@pytest.mark.parametrize(("options", "devices"), [([], "None"), (["--gres=gpu:2"], "0,1")])
def test_ranks_have_all_cores_of_their_nodes_and_see_the_devices_that_were_requested(
    options: tuple[str, ...],
    devices: str,
    slurm_conf: str,
    plugins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    assert placed(tmp_path / "run", *options) == [f"cores {len(os.sched_getaffinity(0))} devices {devices}"] * 2
