"""Plans whose ranks are a small program without a framework; everything else is real."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import accelmark
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.run.launchers import create_launcher
from accelmark.run.preflight.hosts import Preflight
from accelmark.run.processes import RUN_MARKER
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import FolderRef, folders, tree_hash
from accelmark.spec.settings.training import EndSettings, TrainSettings

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
CASE = Path(accelmark.__file__).parent / "vendors" / "cpu"
"""Used as the folder of a case, which fake ranks do not read."""


def job_spec(model: str = "toy", repeat: int = 1, number: int = 1, nnodes: int = 1) -> JobSpec:
    return JobSpec(
        key=CaseKey(
            model=model, framework="pytorch" if nnodes == 1 else "bare", hardware="X1", nnodes=nnodes, repeat=repeat
        ),
        round=number,
        case=FolderRef(name=model, path=CASE, sha256=tree_hash(CASE)),
        case_version=1,
        vendor="acme",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
        work=TrainJob(
            unit="token",
            units_per_sample=16,
            target=None,
            reference_loss=None,
            settings=TrainSettings(batch_size=8, end=EndSettings(max_steps=5)),
        ).for_round(number),
    )


def make_plan(
    *cases: tuple[str, ...], repeat: int = 1, hosts: tuple[str, ...] = ("localhost",), **changed: object
) -> Plan:
    """Make a plan of one key for each of ``cases``, one rank per host, whose ranks behave as its modes say.

    Several hosts need the fixture ``plugins``: no launcher of a framework starts their ranks.
    """
    jobs, vendor = [], folders("vendors").get("acme")
    for index, modes in enumerate(cases):
        for number in range(1, repeat + 1):
            spec = job_spec(f"toy{index}", repeat, number, len(hosts))
            command = ("python", str(FAKE_RANK), "job.json", *modes)
            nodes = tuple(
                PlannedNode(host=host, noderank=noderank, nproc=1, command=command)
                for noderank, host in enumerate(hosts)
            )
            jobs.append(PlannedJob(directory=f"{spec.key.slug}/round{number}", job=spec, nodes=nodes))
    plan = Plan(
        name="test",
        created_at="2026-01-01T00:00:00Z",
        accelmark_version=accelmark.__version__,
        source_sha256=tree_hash(Path(accelmark.__file__).parent),
        vendor="acme",
        vendor_sha256=tree_hash(vendor.path) if vendor is not None else "0" * 64,
        stall_timeout_s=60.0,
        telemetry_interval_s=0.2,
        cluster=ClusterSpec(),
        jobs=tuple(jobs),
    )
    return plan.model_copy(update=changed)


def problems(plan: Plan, run: Path, *given: Path) -> list[Problem]:
    """Check the hosts of a plan, with directories of data; returns the problems except other load on this machine."""

    async def check() -> list[Problem]:
        async with create_launcher(plan, run) as launcher:
            return await Preflight(launcher, plan.jobs).run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelmark.run.preflight.checks.given_data", lambda _: [(None, path) for path in given])
        return [problem for problem in asyncio.run(check()) if "busy: load" not in problem.what]


def left_running(run: Path) -> list[int]:
    return processes_with(f"{RUN_MARKER}={run}".encode())


def processes_with(needle: bytes) -> list[int]:
    """Return the living processes with an environment variable that begins with ``needle``, this one not."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            runs = process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            continue
        if runs and process.pid != os.getpid() and any(entry.startswith(needle) for entry in environment.split(b"\0")):
            found.append(process.pid)
    return found


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(0.02)
