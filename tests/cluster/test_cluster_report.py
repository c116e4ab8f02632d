"""The measurement of a cluster, on hosts over SSH."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml

from accelmark.results.cluster import ClusterReport
from accelmark.run.measure import probe
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.log.records import Collective
from accelmark.spec.plugins.catalog import load_vendor
from tests.cluster.conftest import statuses
from tests.cluster.test_containers import CASE, accelmark, write_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
MakeCluster = Callable[..., ClusterSpec]


def test_all_parts_are_measured_on_two_hosts(cluster: MakeCluster, plugins: Path, tmp_path: Path) -> None:
    write_tiny(plugins, CASE.replace("[precision, loader]", "[precision, loader, checkpoint, log_every_steps]"))
    file, out = tmp_path / "rack.yaml", tmp_path / "measured"
    file.write_text(yaml.safe_dump(cluster(2, name="rack", vendor="acme").model_dump(mode="json", exclude_unset=True)))
    arguments = ("--case", "tiny", "--hardware", "X1", "--steps", "80", "--budget", "3", "--set", "threads=1")
    ended = accelmark("cluster", str(file), *arguments, "--out", str(out), "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = ClusterReport.model_validate(json.loads(ended.stdout.splitlines()[-1])["report"])
    assert report.reasons == {}, ended.stdout + ended.stderr
    assert report == ClusterReport.model_validate_json((out / "cluster.json").read_bytes())
    assert report.collectives is not None
    assert {one.operation for one in report.collectives.sweep} >= {"all_reduce", "all_to_all", "point_to_point"}
    assert report.checkpoints is not None
    assert (report.checkpoints.num_checkpoints >= 4, report.checkpoints.num_bytes > 0) == (True, True)
    recovery = report.recovery
    assert recovery is not None
    assert (recovery.rank, recovery.host) == (1, "n2")
    assert min(recovery.noticed_s, recovery.restarted_s, recovery.trained_s) > 0
    assert 0 < recovery.lost_steps < 20, "a checkpoint every 20 steps"
    page = (out / "cluster.html").read_text()
    assert "2×1 against 1×1" in page
    assert "Not measured" not in page
    assert report.one_machine == ("n1", "n2"), "the hosts of the bed are namespaces of this machine"
    assert "not conclusive: " in page, "the efficiency of hosts that are one machine is no headline"
    kill = next(event.reason for event in RunDirectory.open(out / "recovery").events() if event.state == "failed")
    assert "rank 1: killed by SIGKILL" in (kill or "")
    assert "rank 1 is killed on purpose after step" in ended.stderr
    (status,) = statuses(out / "recovery")
    assert (status.state, status.attempt) == ("succeeded", 2)
    (first,) = (out / "recovery").glob("*/round1/attempt1/n2_noderank1/exit.json")
    assert "killed by SIGKILL" in first.read_text()


def test_collectives_between_hosts_are_measured_over_sizes(cluster: MakeCluster) -> None:
    found = probe(load_vendor("cpu"), "CPU", 1, ["collectives"], 4.0, cluster(3, vendor="cpu"))
    assert found.world_size == 3
    assert found.hosts == ("n1", "n2", "n3")
    assert set(found.collectives) == set(get_args(Collective))
    assert all(rate.value is not None and rate.value > 0 for rate in found.collectives.values())
    reduced = [timing for timing in found.sweep if timing.operation == "all_reduce"]
    assert len(reduced) > 1
    for timing in reduced:
        assert timing.bus_gb_s == pytest.approx(timing.algorithm_gb_s * 2 * 2 / 3)
        assert timing.algorithm_gb_s == pytest.approx(timing.size_bytes / timing.time_us / 1e3)
