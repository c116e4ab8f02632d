"""Measure the devices of this machine, or of the hosts of a cluster together, in a job with node agents."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

import accelmark
from accelmark.datasets.ensure import cache_directory
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.results.read.round_dir import node_dirs, read_json
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.controller.cancellation import Cancellation, run_until_signal
from accelmark.run.controller.execution import execute_job
from accelmark.run.launchers import create_launcher, plan_of_hosts
from accelmark.run.preflight.hosts import Preflight, missing_here, require_ready
from accelmark.run.record.directory import RunDirectory, safe_name
from accelmark.run.record.states import utc_now
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec, ProbeJob
from accelmark.spec.key import CaseKey
from accelmark.spec.log.records import CEILINGS_FILE, Ceilings, ProbeItem
from accelmark.spec.plugins.catalog import FolderRef, framework_device, load_framework
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.requirements import Need
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.telemetry.host.sampler import BUSY_CPU

_FRAMEWORK: Final = "pytorch"
"""The framework in which :mod:`accelmark.probe` measures."""


def probe(
    vendor: VendorSpec,
    hardware: str,
    nproc: int,
    items: Sequence[ProbeItem],
    budget_s: float,
    cluster: ClusterSpec | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Ceilings:
    """Measure ``nproc`` devices of this machine, or of each host of ``cluster`` together.

    ``report`` receives what the launcher waits for. The result of this machine is cached for later runs; that of a busy
    host is marked, and does not replace one of an idle host.

    Raises HostsNotReadyError: a host is not ready. Raises RunError: a rank failed; its reason is given.
    """
    spec = cluster or ClusterSpec()

    async def run_job() -> None:
        (job,) = run.plan.jobs
        launcher = create_launcher(run.plan, run.path)
        launcher.report = report
        try:
            is_here, preflight = launcher.spec.is_localhost, Preflight(run, launcher, (job,))
            require_ready(await (missing_here(run, launcher) if is_here else preflight.run()), run.plan)
            state, reason = await execute_job(run, job, launcher, lambda *_: None, Cancellation())
            if state != "succeeded":
                raise RunError(f"the probe {state.replace('_', ' ')}: {reason}")
        finally:
            await launcher.close()

    # Hosts that share the file system have to see the directory.
    place = Path.cwd() if spec.launcher != "local" and load_launcher(spec.launcher).shares_filesystem else None
    with tempfile.TemporaryDirectory(prefix="accelmark-probe-", dir=place) as directory:
        plan = _plan(vendor, hardware, nproc, ProbeJob(items=tuple(items), budget_s=budget_s), spec)
        run = RunDirectory.create(Path(directory) / "run", plan)
        run_until_signal(run_job())
        nodes = node_dirs(run.round_dir(plan.jobs[0]))
        ceilings = Ceilings.stored(nodes[0].path / CEILINGS_FILE)
        if ceilings is None:
            raise RunError("the probe wrote no result")
        disturbed: list[str] = []
        for node in nodes:  # other load on a host before and during the probe
            where = "" if node.host == "localhost" else f"{node.host}: "
            info, ended = read_json(node.path / "sys_info.json"), node.exit
            disturbed += [f"{where}{reason}" for reason in info.get("busy_at_start") or ()]
            num_cores = (info.get("cpu") or {}).get("num_cores") or psutil.cpu_count() or 1
            if ended is not None and (others_s := ended.others_cpu_s or 0.0) > BUSY_CPU * ended.duration_s * num_cores:
                used = f"other processes used {others_s:.1f} s of CPU time in {ended.duration_s:.1f} s"
                disturbed.append(f"{where}{used}")
        ceilings = ceilings.model_copy(update={"disturbed": tuple(disturbed)})
    if cluster is not None:
        return ceilings
    path = _cache_path(vendor.name, hardware) / f"x{nproc}.json"
    earlier = Ceilings.stored(path)
    if not ceilings.disturbed or earlier is None or earlier.disturbed:
        make_directory(path.parent)
        write_atomic(path, ceilings.model_dump_json(indent=2))
    return ceilings


def remembered(vendor: str, hardware: str) -> Ceilings | None:
    """Return the cached result of these devices on this host, or None.

    Results of an idle host come first, then those with the fewest ranks.
    """
    paths = sorted(_cache_path(vendor, hardware).glob("x*.json"), key=lambda path: (len(path.name), path.name))
    known = [ceilings for path in paths if (ceilings := Ceilings.stored(path)) is not None and ceilings.matmul]
    return next((ceilings for ceilings in known if not ceilings.disturbed), known[0] if known else None)


def _cache_path(vendor: str, hardware: str) -> Path:
    return cache_directory() / "probes" / safe_name(socket.gethostname()) / f"{safe_name(vendor)}-{safe_name(hardware)}"


def _plan(vendor: VendorSpec, hardware: str, nproc: int, probe: ProbeJob, cluster: ClusterSpec) -> Plan:
    names = tuple(host.name for host in cluster.hosts)
    key = CaseKey(model="probe", framework=_FRAMEWORK, hardware=hardware, nnodes=len(names), nproc=nproc)
    device = framework_device(vendor, key.framework)
    job = JobSpec(
        work=probe.model_copy(update={"hosts": names}),
        key=key,
        round=1,
        case=FolderRef(name="probe", path=Path(accelmark.__file__).parent / "probe", sha256=""),
        case_version=1,
        vendor=vendor.name,
        device_type=device.device_type,
        framework_module=device.module,
        collective_backend=device.collective_backend,
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
    )
    command = tuple(module_command("python", probe.rank_module, "job.json"))
    nodes = tuple(
        PlannedNode(host=name, noderank=noderank, nproc=nproc, command=command) for noderank, name in enumerate(names)
    )
    wanted = (*load_framework(key.framework).requires, *device.requires)
    requires = tuple(Need(requirement=requirement, needed_by="accelmark probe") for requirement in wanted)
    jobs = (PlannedJob(directory="probe/round1", job=job, nodes=nodes, requires=requires),)
    changed = {"name": "probe", "created_at": utc_now(), "vendor": vendor.name, "open": True, "jobs": jobs}
    return plan_of_hosts(cluster).model_copy(update=changed)
