"""A job's part on each of its hosts, as launchers deliver it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from accelmark.plan.adaptation import requirements_file
from accelmark.plan.plan import PlannedJob
from accelmark.results.read.round_dir import read_job
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.task import EXIT_FILE, AgentTask, Limits, NodeJob, TelemetryTask, VisibleDevices
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import RunError
from accelmark.spec.job import EvaluateJob, ExternalJob, JobSpec, TrainingWork
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.spec.plugins.framework import Server

JOB_FILE: Final = "job.json"
_HOST_WAIT_S: Final = 3600.0
"""Longest time for which later jobs of a run wait for a run that has locked one of its hosts meanwhile."""


async def write_job(
    directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, from_checkpoint: bool = False
) -> list[NodeJob]:
    """Write ``job.json`` of a job, and return its part on each of its hosts; see :func:`node_jobs`."""
    file = directory.round_dir(job) / JOB_FILE
    if not (from_checkpoint and has_checkpoints(directory, job, launcher)):
        file.unlink(missing_ok=True)
    nodes = await node_jobs(directory, job, launcher, from_checkpoint=from_checkpoint)
    make_directory(file.parent)
    write_atomic(file, nodes[0].job.model_dump_json(indent=2))
    return nodes


async def node_jobs(
    directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, from_checkpoint: bool = False
) -> list[NodeJob]:
    """Return a job's part on each of its hosts, which ``python -m accelmark.run.agent.agent`` carries out there.

    ``from_checkpoint``: whether to resume from checkpoints of an interrupted attempt, if there are any.
    """
    has_begun = any(directory.path.glob(f"*/*/*_noderank*/{EXIT_FILE}"))
    plan, spec = directory.plan, _job_on_hosts(directory, job, launcher, from_checkpoint=from_checkpoint)
    hosts = {host.name: host for host in plan.cluster.hosts}
    mine = [hosts[node.host] for node in job.nodes]
    servers = [
        Server(address=await launcher.master_address(host), port=host.service_ports[0])
        for host in mine
        if host.service_ports
    ]
    flagperf = {
        "FLAGPERF_HOSTS": ",".join(server.address for server in servers),
        "FLAGPERF_HOSTS_PORTS": ",".join(str(server.port) for server in servers),
    }
    master_address = await launcher.master_address(mine[0])
    vendor, folder = load_vendor(plan.vendor), find("vendors", plan.vendor)
    is_trusted = not isinstance(spec.work, EvaluateJob) or folder.origin == "accelmark"
    telemetry = TelemetryTask(vendor=plan.vendor, vendor_folder=folder.path, interval_s=plan.telemetry_interval_s)
    variable = plan.cluster.visible_devices_env or vendor.visible_devices_env
    adapted = spec.adaptation.path if spec.adaptation is not None else None
    return [
        NodeJob(
            host=host,
            node_dir=directory.node_dir(job, node),
            job=spec,
            task=AgentTask(
                run=str(directory.path),
                host=host.name,
                noderank=node.noderank,
                nnodes=len(job.nodes),
                nproc=node.nproc,
                ranks_per_host=spec.ranks_per_host,
                command=node.command,
                job_file=directory.round_dir(job) / JOB_FILE,
                framework=spec.framework,
                python=plan.cluster.environment_python(spec.framework),
                master_address=master_address,
                master_port=plan.cluster.master_port,
                environment={
                    **(vendor.environment if is_trusted else {}),
                    **(flagperf if servers else {}),
                    **plan.cluster.environment,
                },
                threads=spec.work.threads,
                visible_devices=VisibleDevices(variable=variable, count=node.nproc) if variable is not None else None,
                reported_variables=vendor.reported_variables,
                servers=tuple(servers),
                interface=host.interface,
                clear_caches=plan.cluster.clear_caches,
                adaptation=adapted,
                requirements=requirements_file(adapted, spec.case.path),
                case=spec.case.path,
                data_dirs=tuple(spec.data_dirs.values()),
                telemetry=None if isinstance(spec.work, EvaluateJob) else telemetry,
                limits=Limits(
                    timeout_s=plan.timeout_s,
                    stall_timeout_s=plan.stall_timeout_s,
                    host_wait_s=_HOST_WAIT_S if has_begun else 0.0,
                ),
            ),
        )
        for host, node in zip(mine, job.nodes, strict=True)
    ]


def _job_on_hosts(directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, from_checkpoint: bool) -> JobSpec:
    """Return the job with its paths, as its ranks read it."""
    changed: dict[str, object] = {
        "checkpoint_dir": directory.round_dir(job) / job.job.checkpoint_dir,
        "resume": from_checkpoint and has_checkpoints(directory, job, launcher),
        "seed": _seed(directory.round_dir(job), job.job),
    }
    if directory.plan.cluster.container is not None:  # mounted folders are in the container, installed packages are not
        for name, ref in (("case", job.job.case), ("extern", job.job.extern)):
            if ref is not None and ref.package is not None and not ref.package.startswith("accelmark."):
                changed[name] = ref.model_copy(update={"package": None})
    return job.job.model_copy(update=changed)


def _seed(round_dir: Path, job: JobSpec) -> int | None:
    """Return the seed with which a round started, or draw one where a vendor's code, which is hashed, takes part.

    A vendor's code could have been prepared for the seed of the case. An open run may set one.
    """
    is_set = (entry := job.provenance.get("seed")) is not None and entry.forced
    if not isinstance(job.work, TrainingWork) or not job.has_vendors_code or is_set:
        return None
    try:
        return read_job(round_dir).seed
    except RunError:
        return secrets.randbits(31)


def has_checkpoints(directory: RunDirectory, job: PlannedJob, launcher: Launcher) -> bool:
    """Return whether an earlier attempt at a job may have left checkpoints that it can resume from."""
    round_dir, work = directory.round_dir(job), job.job.work
    if isinstance(work, ExternalJob) and not work.trainer.resume:
        return False
    if not launcher.spec.shares_filesystem:  # an attempt that was started may have written some on its hosts
        return any(round_dir.glob("attempt*/*_noderank*"))
    checkpoints = round_dir / job.job.checkpoint_dir
    return checkpoints.is_dir() and any(checkpoints.iterdir())
