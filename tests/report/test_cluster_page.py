"""The page of a cluster: values where parts were measured, reasons where they were not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from accelmark.report.cluster_page import render_cluster
from accelmark.results.cluster import CheckpointWrites, ClusterReport, Recovery, ScalePoint, ScalingCurve
from accelmark.spec.log.records import Ceilings, CollectiveTiming, Rate

POINTS = (
    ScalePoint("scaling", 1, 8, 100.0, 1.0, 1.0, None, "16"),
    ScalePoint("scaling", 4, 8, 380.0, 3.8, 0.95, None, "16"),
)
CURVE = ScalingCurve("llama_mini", "pytorch", "X1", "fp32", "token", synthetic=False, points=POINTS)


def report(**changed: object) -> ClusterReport:
    same: dict[str, Any] = {"operation": "all_reduce", "time_us": 10.0, "algorithm_gb_s": 1.0, "repetitions": 3}
    sweep = [CollectiveTiming(size_bytes=size, bus_gb_s=rate, **same) for size, rate in ((2**10, 0.5), (2**32, 45.25))]
    ceilings = Ceilings(
        device_type="cpu", device_name="X1", world_size=32, framework="pytorch 2.13.0",
        measured_at="2026-01-01T00:00:00Z",
        collectives={"all_reduce": Rate(value=45.25, unit="GB/s", size="4096 MiB")}, sweep=tuple(sweep),
    )  # fmt: skip
    values: dict[str, object] = {
        "name": "rack <1>", "hosts": ("n1", "n2", "n3", "n4"), "nproc": 8, "vendor": "acme", "hardware": "X1",
        "case": "llama_mini:pytorch", "measured_at": "2026-01-01T00:00:00Z", "accelmark_version": "1",
        "collectives": ceilings,
        "checkpoints": CheckpointWrites(num_checkpoints=4, num_bytes=2**30, duration_s=0.5, mb_per_s=2147.48),
        "recovery": Recovery(rank=31, host="n4", noticed_s=1.5, restarted_s=2.25, trained_s=8.0, lost_steps=50),
    }  # fmt: skip
    return ClusterReport.model_validate(values | changed)


def test_every_part_that_was_measured_is_on_the_page() -> None:
    page = render_cluster(report(), CURVE)
    for text in (
        "rack &lt;1&gt;", "95.0\u202f%", "45.25\u202fGB/s", "1 KiB", "4 GiB", "2.147\u202fGB/s", "11.75\u202fs",
        "planned kill of rank 31, detected after 1.500\u202fs", "all-reduce",
    ):  # fmt: skip
        assert text in page, text
    assert "Not measured" not in page
    assert "not conclusive" not in page
    assert "busy machine" not in page


def headlines(page: str) -> list[str]:
    return re.findall(r'<dd class="number">([^<]*)</dd>', page)


@pytest.mark.parametrize(
    ("changed", "speedup", "doubt"),
    [
        ({"disturbed": {"scaling": ("n2: 99 % of the cores are busy",)}}, 3.8, "other work on the hosts"),
        ({"one_machine": ("n1", "n2")}, 3.8, "2 hosts are one machine"),
        ({}, 4.88, "above 100\u202f%"),
    ],
)
def test_an_efficiency_that_its_conditions_do_not_carry_is_no_headline(
    changed: dict[str, object], speedup: float, doubt: str
) -> None:
    last = POINTS[1]._replace(speedup=speedup, efficiency=speedup / 4)
    page = render_cluster(report(**changed), CURVE._replace(points=(POINTS[0], last)))
    assert headlines(page)[0] == "–"
    assert f"4×8 against 1×8, not conclusive: {doubt}" in page
    assert f"{speedup / 4 * 100:.3g}" in page, "its section has it"
    assert ("More than 100" in page) == (speedup > 4)


def test_each_part_has_the_other_work_that_ran_meanwhile() -> None:
    page = render_cluster(report(disturbed={"recovery": ("n4: 99 % of the cores are busy",)}), CURVE)
    scaling, collectives, checkpoints, recovery = page.split('<section class="case"')[1:]
    assert "n4: 99 % of the cores are busy" in recovery
    assert "busy machine" in recovery
    assert all("busy machine" not in part for part in (scaling, collectives, checkpoints))
    assert headlines(page)[0] == "95.0\u202f%"
    assert "detected after 1.500\u202fs; other work on the hosts" in page


def test_a_part_that_was_not_measured_has_its_reason_instead() -> None:
    reasons = {
        "scaling": "the cluster has one host",
        "collectives": "one rank needs no collectives",
        "checkpoints": "no checkpoint was written",
        "recovery": "rank 0 was not killed",
    }
    page = render_cluster(report(collectives=None, checkpoints=None, recovery=None, reasons=reasons), None)
    assert all(f"Not measured: {reason}." in page for reason in reasons.values())
    assert page.count('<dd class="number">–</dd>') == 4
