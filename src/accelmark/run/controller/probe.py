"""Measure the devices of this machine in a job with a node agent, and cache the result."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
from pydantic import ValidationError

import accelmark
from accelmark.datasets.ensure import cache_directory
from accelmark.results.read.round_dir import read_json
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.task import AgentTask, NodeJob, VisibleDevices
from accelmark.run.controller.waiting import run_agents
from accelmark.run.launchers.local.launcher import local_agent
from accelmark.run.record.directory import safe_name
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec, NodeExit, ProbeJob
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import FolderRef, framework_device
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.records import CEILINGS_FILE, Ceilings, ProbeItem
from accelmark.telemetry.host.sampler import BUSY_CPU

_FRAMEWORK: Final = "pytorch"
"""The framework in which :mod:`accelmark.probe` measures."""


def probe(vendor: VendorSpec, hardware: str, nproc: int, items: Sequence[ProbeItem], budget_s: float) -> Ceilings:
    """Measure ``nproc`` devices of this machine, and cache the result for later runs.

    The result of a busy host is marked, and does not replace one of an idle host.

    Raises:
        RunError: a rank failed; its reason is given.
    """
    with tempfile.TemporaryDirectory(prefix="accelmark-probe-") as directory:
        node_dir = Path(directory) / "probe_noderank0"
        node = _node_job(vendor, hardware, nproc, node_dir, ProbeJob(items=items, budget_s=budget_s))
        make_directory(node_dir)
        write_atomic(node.task.job_file, node.job.model_dump_json(indent=2))
        (ended,) = asyncio.run(run_agents([local_agent(node)]))
        if ended.state != "succeeded":
            raise RunError(f"the probe {ended.state.replace('_', ' ')}: {ended.reason}")
        found = _read(node_dir / CEILINGS_FILE)
        if found is None:
            raise RunError("the probe wrote no result")
        found = found.model_copy(update={"disturbed": tuple(_disturbances(node_dir, ended))})
    path = _cache_path(vendor.name, hardware) / f"x{nproc}.json"
    earlier = _read(path)
    if not found.disturbed or earlier is None or earlier.disturbed:
        make_directory(path.parent)
        write_atomic(path, found.model_dump_json(indent=2))
    return found


def _disturbances(node_dir: Path, ended: NodeExit) -> Iterator[str]:
    """Yield other load on the host before and during the probe."""
    reasons = read_json(node_dir / "sys_info.json").get("busy_at_start")
    yield from (str(reason) for reason in (reasons if isinstance(reasons, list) else ()))
    num_cores = psutil.cpu_count() or 1
    if ended.others_cpu_s is not None and ended.others_cpu_s > BUSY_CPU * ended.duration_s * num_cores:
        yield f"other processes used {ended.others_cpu_s:.1f} s of CPU time in {ended.duration_s:.1f} s"


def remembered(vendor: str, hardware: str) -> Ceilings | None:
    """Return the cached result of these devices on this host, or None.

    Results of an idle host come first, then those with the fewest ranks.
    """
    paths = sorted(_cache_path(vendor, hardware).glob("x*.json"), key=lambda path: (len(path.name), path.name))
    known = [found for path in paths if (found := _read(path)) is not None and found.matmul]
    return next((found for found in known if not found.disturbed), known[0] if known else None)


def _read(path: Path) -> Ceilings | None:
    try:
        return Ceilings.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _cache_path(vendor: str, hardware: str) -> Path:
    return cache_directory() / "probes" / safe_name(socket.gethostname()) / f"{safe_name(vendor)}-{safe_name(hardware)}"


def _node_job(vendor: VendorSpec, hardware: str, nproc: int, node_dir: Path, probe: ProbeJob) -> NodeJob:
    key = CaseKey(model="probe", framework=_FRAMEWORK, hardware=hardware, nproc=nproc)
    device = framework_device(vendor, key.framework)
    job = JobSpec(
        work=probe,
        key=key,
        round=1,
        case=FolderRef(name="probe", path=Path(accelmark.__file__).parent / "probe", sha256=""),
        case_version=1,
        vendor=vendor.name,
        device_type=device.device_type,
        framework_module=device.module,
        collective_backend=device.collective_backend,
        data_dirs={},
        checkpoint_dir=node_dir,
    )
    variable = vendor.visible_devices_env
    task = AgentTask(
        run=f"{node_dir}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        host="localhost",
        noderank=0,
        nnodes=1,
        nproc=nproc,
        command=("python", "-m", probe.rank_module, "job.json"),
        job_file=node_dir / "job.json",
        framework=_FRAMEWORK,
        environment=vendor.environment,
        visible_devices=VisibleDevices(variable=variable, count=nproc) if variable is not None else None,
        reported_variables=vendor.reported_variables,
    )
    return NodeJob(host=HostSpec(address="localhost"), node_dir=node_dir, job=job, task=task)
