"""Probing the devices of this machine through the agent and launcher of any other job, and remembering the result."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import ValidationError

import accelmark
from accelmark.datasets import cache_directory
from accelmark.results.read.round_dir import read_json
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.task import AgentTask, VisibleDevices
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.local.launcher import LocalLink
from accelmark.run.record.directory import safe_name
from accelmark.spec.catalog import framework_device
from accelmark.spec.ceilings import CEILINGS_FILE, Ceilings, ProbeItem
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import FolderRef, JobSpec, NodeExit
from accelmark.spec.key import CaseKey
from accelmark.spec.vendor import VendorSpec
from accelmark.spec.work import ProbeJob
from accelmark.telemetry.host.sampler import BUSY_CPU


def probe(vendor: VendorSpec, hardware: str, nproc: int, items: Sequence[ProbeItem], budget_s: float) -> Ceilings:
    """Measure what ``nproc`` devices of this machine reach, and remember it for later runs.

    What was measured on a busy host says so, and replaces nothing that was measured on a quiet one.

    Raises:
        RunError: a rank failed; its reason is given.
    """
    with tempfile.TemporaryDirectory(prefix="accelmark-probe-") as directory:
        node_dir = Path(directory) / "probe_noderank0"
        work = _work(vendor, hardware, nproc, node_dir, ProbeJob(items=items, budget_s=budget_s))
        make_directory(node_dir)
        write_atomic(work.task.job_file, work.job.model_dump_json(indent=2))
        link = LocalLink(work)

        async def body() -> NodeExit:
            await link.prepare()
            await link.start()
            ended = await link.wait()
            if ended.state != "succeeded":
                raise RunError(f"the probe {ended.state.replace('_', ' ')}: {ended.reason}")
            return ended

        ended = asyncio.run(body())
        try:
            found = Ceilings.model_validate_json((node_dir / CEILINGS_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise RunError("the probe ended without a result") from error
        found = found.model_copy(update={"disturbed": tuple(_disturbances(node_dir, ended))})
    path = _place(vendor.name, hardware) / f"x{nproc}.json"
    earlier = _read(path)
    if not found.disturbed or earlier is None or earlier.disturbed:
        make_directory(path.parent)
        write_atomic(path, found.model_dump_json(indent=2))
    return found


def _disturbances(node_dir: Path, ended: NodeExit) -> Iterator[str]:
    """Tell what else the host had to do: before the probe, as the rounds of a run look, and while it ran."""
    told = read_json(node_dir / "sys_info.json").get("busy_at_start")
    yield from (str(reason) for reason in (told if isinstance(told, list) else ()))
    num_cores = psutil.cpu_count() or 1
    if ended.others_cpu_s is not None and ended.others_cpu_s > BUSY_CPU * ended.duration_s * num_cores:
        yield f"other work took {ended.others_cpu_s:.1f} s of CPU time in {ended.duration_s:.1f} s"


def remembered(vendor: str, hardware: str) -> Ceilings | None:
    """Return what an earlier probe of these devices on this host measured, of a quiet host before others.

    Of several, that of fewest ranks; None without.
    """
    paths = sorted(_place(vendor, hardware).glob("x*.json"), key=lambda path: (len(path.name), path.name))
    known = [found for path in paths if (found := _read(path)) is not None and found.matmul]
    return next((found for found in known if not found.disturbed), known[0] if known else None)


def _read(path: Path) -> Ceilings | None:
    try:
        return Ceilings.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _place(vendor: str, hardware: str) -> Path:
    return cache_directory() / "probes" / safe_name(socket.gethostname()) / f"{safe_name(vendor)}-{safe_name(hardware)}"


def _work(vendor: VendorSpec, hardware: str, nproc: int, node_dir: Path, probe: ProbeJob) -> NodeWork:
    key = CaseKey(model="probe", framework="pytorch", hardware=hardware, nproc=nproc)
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
        framework="pytorch",
        environment=vendor.environment,
        visible_devices=VisibleDevices(variable=variable, count=nproc) if variable is not None else None,
    )
    return NodeWork(host=HostSpec(address="localhost"), node_dir=node_dir, job=job, task=task)
