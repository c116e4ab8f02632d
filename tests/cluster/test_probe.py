"""Collectives between hosts, measured by real ranks on hosts with real sshd's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import yaml

from accelmark.run.measure import probe
from accelmark.run.preflight.checks import HostsNotReadyError
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.log.records import Collective
from accelmark.spec.plugins.catalog import load_vendor
from tests.cluster.bed import Bed
from tests.cluster.test_containers import accelmark

pytestmark = pytest.mark.cluster
MakeCluster = Callable[..., ClusterSpec]


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


def test_the_table_has_sizes_and_times_in_units_that_fit(cluster: MakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "rack.yaml"
    file.write_text(yaml.safe_dump(cluster(2, vendor="cpu").model_dump(mode="json", exclude_unset=True)))
    ended = accelmark("probe", "--cluster", str(file), "--only", "collectives", "--budget", "2")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if line.startswith("all_reduce ")]
    assert [row[1:3] for row in rows[:2]] == [["1", "KiB"], ["16", "KiB"]]
    assert {row[4] for row in rows} <= {"s", "ms", "µs"}
    assert "not used for MFU" not in ended.stderr, "collectives are no ceilings of MFU"


def test_a_host_out_of_reach_is_named_before_a_rank_starts(cluster: MakeCluster, bed: Bed) -> None:
    bed.stop_sshd(2)
    try:
        with pytest.raises(HostsNotReadyError, match="n2"):
            probe(load_vendor("cpu"), "CPU", 1, ["collectives"], 2.0, cluster(2, vendor="cpu"))
    finally:
        bed.sshd(2)
