"""A vendor's folder for a case carried out on real hosts: packages, a compiled kernel and variables reach the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.cluster.boxed import ADAPTED, served, write_adaptation, write_index
from tests.cluster.conftest import status_of
from tests.cluster.test_containers import accelmark, in_container, run_file, tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
MakeCluster = Callable[..., ClusterSpec]
__all__ = ["tiny"]


@pytest.fixture
def adapted(tiny: Path) -> Path:
    """The made-up vendor with every part of an adaptation."""
    return write_adaptation(tiny)


def test_packages_kernel_and_variables_reach_the_ranks_in_a_container_and_natively(
    cluster: MakeCluster, bed: Bed, adapted: Path, tmp_path: Path
) -> None:
    with served(write_index(tmp_path / "index"), f"{bed.net}.254") as index:
        enclosed = cluster(1, container=in_container("podman") | {"pip_source": index})
        native = cluster(1, environment={"PIP_INDEX_URL": index, "PIP_TRUSTED_HOST": f"{bed.net}.254"})
        for name, spec in (("enclosed", enclosed), ("native", native)):
            run = tmp_path / name
            ended = accelmark(
                "run", str(run_file(tmp_path, spec, "tiny:pytorch:X1:1:1:1")), "--out", str(run), "--json"
            )
            node = next(run.glob("*/round1/n1_noderank0"))
            assert status_of(run)[0].state == "succeeded", f"{ended.stdout}{ended.stderr}{status_of(run)}"
            assert ADAPTED in (node / "rank0.out.log").read_text()
            record = json.loads((node / "adaptation.json").read_text())
            assert record["installed"] == ["acme-kernel==1.0", "acme-notes==1.0"]
            assert record["environment"] == {"ACME_MODE": "fast mode"}
            task = json.loads((node / "agent.json").read_text())
            assert task["adaptation"].startswith("/var/tmp/accelmark/code/"), "as it was delivered, not as it is here"
