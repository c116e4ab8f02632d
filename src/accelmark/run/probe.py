"""Probing the devices of this machine through the agent and launcher of any other job, and remembering the result."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

import accelmark
from accelmark.datasets import cache_directory
from accelmark.results.files import make_directory, write_atomic
from accelmark.run.directory import safe_name
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.local import LocalLink
from accelmark.run.task import AgentTask, VisibleDevices
from accelmark.spec.ceilings import Ceilings, ProbeItem
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import FolderRef, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.vendor import VendorSpec

_REQUEST: Final = "probe.json"
_CEILINGS: Final = "ceilings.json"


def probe(vendor: VendorSpec, hardware: str, nproc: int, items: Sequence[ProbeItem], budget_s: float) -> Ceilings:
    """Measure what ``nproc`` devices of this machine reach, and remember it for later runs.

    Raises:
        RunError: a rank failed; its reason is given.
    """
    with tempfile.TemporaryDirectory(prefix="accelmark-probe-") as directory:
        node_dir = Path(directory) / "probe_noderank0"
        work = _work(vendor, hardware, nproc, node_dir)
        make_directory(node_dir)
        request = {"place": work.job.model_dump(mode="json"), "items": list(items), "budget_s": budget_s}
        write_atomic(work.task.job_file, json.dumps(request, indent=2))
        link = LocalLink(work)

        async def body() -> None:
            await link.prepare()
            await link.start()
            ended = await link.wait()
            if ended.state != "succeeded":
                raise RunError(f"the probe {ended.state.replace('_', ' ')}: {ended.reason}")

        asyncio.run(body())
        try:
            found = Ceilings.model_validate_json((node_dir / _CEILINGS).read_bytes())
        except (OSError, ValidationError) as error:
            raise RunError("the probe ended without a result") from error
    path = _place(vendor.name, hardware) / f"x{nproc}.json"
    make_directory(path.parent)
    write_atomic(path, found.model_dump_json(indent=2))
    return found


def remembered(vendor: str, hardware: str) -> Ceilings | None:
    """Return what an earlier probe of these devices on this host measured, the one of fewest ranks; None without."""
    for path in sorted(_place(vendor, hardware).glob("x*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            found = Ceilings.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
        if found.matmul:
            return found
    return None


def _place(vendor: str, hardware: str) -> Path:
    return cache_directory() / "probes" / safe_name(socket.gethostname()) / f"{safe_name(vendor)}-{safe_name(hardware)}"


def _work(vendor: VendorSpec, hardware: str, nproc: int, node_dir: Path) -> NodeWork:
    key = CaseKey(model="probe", framework="pytorch", hardware=hardware, nproc=nproc)
    job = JobSpec(
        task="train",
        key=key,
        round=1,
        case=FolderRef(name="probe", path=Path(accelmark.__file__).parent / "probe", sha256=""),
        case_version=1,
        vendor=vendor.name,
        device_type=vendor.device_type,
        framework_module=vendor.framework_module,
        distributed_backend=vendor.distributed_backend,
        data_dirs={},
        checkpoint_dir=node_dir,
    )
    alone = ("python", "-m", "accelmark.probe", "job.json")
    together = ("python", "-m", "accelmark.train.launch", "job.json", "--module", "accelmark.probe")
    variable = vendor.visible_devices_env
    task = AgentTask(
        run=f"{node_dir}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        host="localhost",
        noderank=0,
        nnodes=1,
        nproc=nproc,
        command=alone if nproc == 1 else together,
        job_file=node_dir / _REQUEST,
        framework="pytorch",
        environment=vendor.environment,
        visible_devices=VisibleDevices(variable=variable, count=nproc) if variable is not None else None,
    )
    return NodeWork(host=HostSpec(address="localhost"), node_dir=node_dir, job=job, task=task)
