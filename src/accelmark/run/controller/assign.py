"""From a planned job to what each host's agent is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.run.agent.services import server_variables
from accelmark.run.agent.task import AgentTask, Limits, TelemetryTask, VisibleDevices
from accelmark.run.launchers.launcher import Launcher, NodeWork
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.catalog import find, load_framework, load_vendor
from accelmark.spec.cluster import HostSpec
from accelmark.spec.framework import Server
from accelmark.spec.job import JobSpec

JOB_FILE: Final = "job.json"
REQUIREMENTS_FILE: Final = "requirements.txt"


def job_on_hosts(directory: RunDirectory, job: PlannedJob, *, go_on: bool) -> JobSpec:
    """Return the job as its ranks read it: paths filled in; it goes on from checkpoints where asked and there are any.

    Args:
        directory: the run.
        job: the planned job.
        go_on: whether an earlier attempt was cut off, whose checkpoints may be used.
    """
    checkpoints = directory.round_dir(job) / job.job.checkpoint_dir
    elsewhere = directory.plan.cluster.launcher == "ssh"  # then they are on the hosts, if there are any
    has_any = elsewhere or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    changed: dict[str, object] = {"checkpoint_dir": checkpoints, "resume": go_on and has_any}
    if (
        directory.plan.cluster.container is not None
    ):  # packages that are installed here are not inside: only folders are
        ours = "accelmark."
        for name, ref in (("case", job.job.case), ("extern", job.job.extern)):
            if ref is not None and ref.package is not None and not ref.package.startswith(ours):
                changed[name] = ref.model_copy(update={"package": None})
    return job.job.model_copy(update=changed)


def node_works(directory: RunDirectory, job: PlannedJob, spec: JobSpec, launcher: Launcher) -> list[NodeWork]:
    """Return the work of each host of a job."""
    hosts = {host.name: host for host in directory.plan.cluster.hosts}
    mine = [hosts[node.host] for node in job.nodes]
    master = launcher.master_address(mine[0])
    servers = [
        Server(address=launcher.master_address(host), port=host.service_ports[0]) for host in mine if host.service_ports
    ]
    return [
        NodeWork(
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
        ranks_per_host=load_framework(job.job.key.framework).ranks_per_host(node.nproc),
        command=node.command,
        job_file=directory.round_dir(job) / JOB_FILE,
        framework=job.job.framework,
        master_address=master,
        master_port=plan.cluster.master_port,
        environment={
            **vendor.environment,
            **launcher.environment(),
            **server_variables(servers),
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


def _adaptation_folder(plan: Plan, job: JobSpec) -> Path:
    return _vendor_folder(plan) / "cases" / f"{job.key.model}-{job.key.framework}"


def _vendor_folder(plan: Plan) -> Path:
    return find("vendors", plan.vendor).path


def requirements_of(adaptation: Path | None, case: Path) -> Path | None:
    """Return the file of packages that counts: the one in the vendor's folder for a case replaces the case's own."""
    folders = (adaptation, case) if adaptation is not None else (case,)
    return next((file for folder in folders if (file := folder / REQUIREMENTS_FILE).is_file()), None)
