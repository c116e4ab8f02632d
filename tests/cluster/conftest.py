"""A bed of four hosts for all tests here, and the check that every test leaves nothing running on any of them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelmark.plan.plan import Plan
from accelmark.run.record.states import JobStatus
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.run.fakes import make_plan
from tests.run.test_session import done, drive, ends, refused, running, signalled, statuses, stepping

NUM_HOSTS = 4
__all__ = ["done", "drive", "ends", "refused", "running", "signalled", "statuses", "stepping"]


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    if os.geteuid() != 0 or shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("needs root and sshd")
    with tempfile.TemporaryDirectory(prefix="accelmark-bed-") as directory:
        bed = Bed(Path(directory) / "bed", NUM_HOSTS)
        try:
            bed.up()
            yield bed
        finally:
            bed.down()


@pytest.fixture
def cluster(bed: Bed) -> Callable[..., ClusterSpec]:

    def make(num_hosts: int = 1, **changed: object) -> ClusterSpec:
        values: dict[str, object] = {
            "name": "bed",
            "launcher": "ssh",
            "hosts": [{"address": bed.address(number), "label": f"n{number}"} for number in range(1, num_hosts + 1)],
            "key": bed.root / "key",
            "known_hosts": bed.root / "known_hosts",
            "user": "root",
            "python": sys.executable,
            "reconnect_s": 30.0,
            "min_disk_mib": 0,
        }
        return ClusterSpec.model_validate(values | changed)

    return make


@pytest.fixture
def plan(cluster: Callable[..., ClusterSpec], plugins: Path) -> Callable[..., Plan]:
    """Make a plan of fake ranks on the bed's first hosts."""

    def make(
        *cases: tuple[str, ...], num_hosts: int = 1, on: dict[str, object] | None = None, **changed: object
    ) -> Plan:
        spec = cluster(num_hosts, **(on or {}))
        made = make_plan(*cases, hosts=tuple(host.name for host in spec.hosts), cluster=spec)
        return made.model_copy(update=changed)

    return make


@pytest.fixture(autouse=True)
def nothing_left_on_any_host(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no process on any host but its sshd, no leftovers in its work directory's runs."""
    yield
    if "bed" not in request.fixturenames:
        return
    bed: Bed = request.getfixturevalue("bed")
    deadline = time.monotonic() + 60
    while left := bed.processes():
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {left}")
        time.sleep(0.1)


def record_fault(what: str, expected: str, status: JobStatus, noticed_s: float | None = None, left: int = 0) -> None:
    """Append a row to the table of faults (benchmarks/faults.md) where ``ACCELMARK_FAULTS`` names a file."""
    if (file := os.environ.get("ACCELMARK_FAULTS")) is not None:
        seen = status.state + (f": {status.reason.splitlines()[0]}" if status.reason else "")
        took = f"{noticed_s:.1f}" if noticed_s is not None else "-"
        with Path(file).open("a") as table:
            table.write(f"| {what} | {expected} | {seen.replace('|', ' ')} | {took} | {left} |\n")


def on_first_host_only(plan: Plan, index: int) -> Plan:
    jobs = list(plan.jobs)
    jobs[index] = jobs[index].model_copy(update={"nodes": jobs[index].nodes[:1]})
    return plan.model_copy(update={"jobs": tuple(jobs)})
