"""Collectives between hosts, measured by real ranks on hosts with real sshd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from accelmark.run.preflight.facts import HostsNotReadyError
from accelmark.run.probe import probe
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.log.records import Collective
from accelmark.spec.plugins.catalog import load_vendor
from tests.cluster.bed import Bed

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


def test_a_host_out_of_reach_is_named_before_a_rank_starts(cluster: MakeCluster, bed: Bed) -> None:
    bed.stop_sshd(2)
    try:
        with pytest.raises(HostsNotReadyError, match="n2"):
            probe(load_vendor("cpu"), "CPU", 1, ["collectives"], 2.0, cluster(2, vendor="cpu"))
    finally:
        bed.sshd(2)
