"""Build the job file and the agents' tasks of a planned job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.run.agent.task import AgentTask, Limits, NodeJob, TelemetryTask, VisibleDevices
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.spec.plugins.framework import Server
from accelmark.spec.plugins.launcher import load_launcher

JOB_FILE: Final = "job.json"
REQUIREMENTS_FILE: Final = "requirements.txt"


def job_on_hosts(directory: RunDirectory, job: PlannedJob, *, go_on: bool) -> JobSpec:
    """Return the job with its paths, as its ranks read it.

    Args:
        directory: the run.
        job: the planned job.
        go_on: whether to resume from checkpoints of an interrupted attempt, if there are any.
    """
    checkpoints = directory.round_dir(job) / job.job.checkpoint_dir
    on_hosts = not load_launcher(directory.plan.cluster.launcher).shares_filesystem  # cannot be checked from here
    has_any = on_hosts or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    changed: dict[str, object] = {"checkpoint_dir": checkpoints, "resume": go_on and has_any}
    if directory.plan.cluster.container is not None:  # mounted folders are in the container, installed packages are not
        ours = "accelmark."
        for name, ref in (("case", job.job.case), ("extern", job.job.extern)):
            if ref is not None and ref.package is not None and not ref.package.startswith(ours):
                changed[name] = ref.model_copy(update={"package": None})
    return job.job.model_copy(update=changed)


def node_jobs(directory: RunDirectory, job: PlannedJob, spec: JobSpec, launcher: Launcher) -> list[NodeJob]:
    """Return a job's part on each of its hosts."""
    hosts = {host.name: host for host in directory.plan.cluster.hosts}
    mine = [hosts[node.host] for node in job.nodes]
    master = launcher.master_address(mine[0])
    servers = [
        Server(address=launcher.master_address(host), port=host.service_ports[0]) for host in mine if host.service_ports
    ]
    return [
        NodeJob(
            host=hosts[node.host],
            node_dir=directory.node_dir(job, node),
            job=spec,
            task=_task(directory, job, node, hosts[node.host], master, servers, launcher),
        )
        for node in job.nodes
    ]


def _task(
    directory: RunDirectory,
    job: PlannedJob,
    node: PlannedNode,
    host: HostSpec,
    master: str,
    servers: Sequence[Server],
    launcher: Launcher,
) -> AgentTask:
    plan = directory.plan
    vendor = load_vendor(plan.vendor)
    variable = plan.cluster.visible_devices_env or vendor.visible_devices_env
    adaptation = _adaptation_folder(plan, job.job) if job.job.adaptation is not None else None
    return AgentTask(
        run=str(directory.path),
        host=host.name,
        noderank=node.noderank,
        nnodes=len(job.nodes),
        nproc=node.nproc,
        ranks_per_host=job.job.ranks_per_host,
        command=node.command,
        job_file=directory.round_dir(job) / JOB_FILE,
        framework=job.job.framework,
        master_address=master,
        master_port=plan.cluster.master_port,
        environment={
            **vendor.environment,
            **_flagperf_variables(servers),
            **plan.cluster.environment,
        },
        threads=job.job.work.threads,
        visible_devices=VisibleDevices(variable=variable, count=node.nproc) if variable is not None else None,
        servers=tuple(servers),
        interface=host.interface,
        clear_caches=plan.cluster.clear_caches,
        adaptation=adaptation,
        requirements=requirements_of(adaptation, job.job.case.path),
        telemetry=TelemetryTask(
            vendor=plan.vendor, vendor_folder=_vendor_folder(plan), interval_s=plan.telemetry_interval_s
        ),
        limits=Limits(timeout_s=plan.timeout_s, stall_timeout_s=plan.stall_timeout_s),
    )


def _flagperf_variables(servers: Sequence[Server]) -> dict[str, str]:
    """Return FlagPerf's variables with the addresses and ports of all servers, by noderank; empty without servers."""
    if not servers:
        return {}
    return {
        "FLAGPERF_HOSTS": ",".join(server.address for server in servers),
        "FLAGPERF_HOSTS_PORTS": ",".join(str(server.port) for server in servers),
    }


def _adaptation_folder(plan: Plan, job: JobSpec) -> Path:
    return _vendor_folder(plan) / "cases" / f"{job.key.model}-{job.key.framework}"


def _vendor_folder(plan: Plan) -> Path:
    return find("vendors", plan.vendor).path


def requirements_of(adaptation: Path | None, case: Path) -> Path | None:
    """Return the requirements file: the one in the vendor's folder for a case replaces the case's own."""
    folders = (adaptation, case) if adaptation is not None else (case,)
    return next((file for folder in folders if (file := folder / REQUIREMENTS_FILE).is_file()), None)
