"""Where a run's files are on a host, and a job as a host has to read it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.datasets import CACHE_VARIABLE, cache_directory
from accelmark.plan.plan import Plan
from accelmark.run.agent.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.agent.task import AgentTask, TelemetryTask
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.ssh.wheel import PLUGINS, on_host, path_on_host, wheel
from accelmark.run.record.directory import safe_name
from accelmark.spec.catalog import PLUGINS_VARIABLE, Kind
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import JobSpec


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The directories of one run on its hosts, below the work directory."""

    work: PurePosixPath
    run_id: str
    is_shared: bool = False
    """Whether all hosts see the same files there."""
    abandon_s: float | None = None
    """Longest time in which no coordinator asks after a job."""
    home: PurePosixPath | None = None
    """The run's directory on this machine where all hosts see it too: they write to it, and nothing is copied."""

    @classmethod
    def of(cls, plan: Plan, run: Path) -> Layout:
        """Return the layout of the run at ``run``; its name is unlike that of any other run of any coordinator."""
        mark = hashlib.sha256(f"{run}\0{plan.created_at}\0{plan.name}".encode()).hexdigest()[:8]
        shared = plan.cluster.shared_directory
        work = shared / "accelmark" if shared is not None else plan.cluster.work_directory
        is_seen = shared is not None and run.absolute().is_relative_to(shared)
        home = PurePosixPath(run.absolute()) if is_seen else None
        return cls(PurePosixPath(work), f"{run.name}-{mark}", shared is not None, plan.cluster.abandon_s, home)

    @property
    def code(self) -> PurePosixPath:
        """Where AccelMark is unpacked."""
        return self.work / "code" / wheel().directory

    @property
    def run(self) -> PurePosixPath:
        """The run's own directory."""
        return self.home or self.work / "runs" / self.run_id

    def lock(self, host: HostSpec) -> PurePosixPath:
        """Return what a job locks so that no other run uses the host."""
        return self.work / (f"host-{safe_name(host.address)}.lock" if self.is_shared else "host.lock")

    def node_dir(self, work: NodeWork) -> PurePosixPath:
        """Return a job's directory on its host."""
        round_dir, case = work.node_dir.parent, work.node_dir.parent.parent
        return self.run / case.name / round_dir.name / work.node_dir.name

    def job_file(self, work: NodeWork) -> PurePosixPath:
        """Return where a job stands as its hosts read it; beside the coordinator's own where that is seen by them."""
        return self.node_dir(work).parent / ("job.hosts.json" if self.home is not None else "job.json")

    def job(self, work: NodeWork) -> JobSpec:
        """Return the job with paths as they are on a host."""
        job = work.job
        return job.model_copy(
            update={
                "case": on_host(job.case, "cases", self.code),
                "extern": on_host(job.extern, "vendors", self.code) if job.extern is not None else None,
                "checkpoint_dir": Path(self.node_dir(work).parent / "checkpoints"),
            }
        )

    def task(self, work: NodeWork) -> AgentTask:
        """Return the agent's task with paths as they are on a host."""
        task = work.task
        telemetry = task.telemetry
        if telemetry is not None:
            folder = path_on_host(telemetry.vendor_folder, "vendors", self.code)
            telemetry = TelemetryTask(vendor=telemetry.vendor, vendor_folder=folder, interval_s=telemetry.interval_s)
        adaptation, requirements = task.adaptation, task.requirements
        if requirements is not None:
            kind: Kind = "cases" if requirements.is_relative_to(work.job.case.path) else "vendors"
            requirements = path_on_host(requirements, kind, self.code)
        changed = {
            "run": self.run_id,
            "adaptation": path_on_host(adaptation, "vendors", self.code) if adaptation is not None else None,
            "requirements": requirements,
            "job_file": Path(self.job_file(work)),
            "telemetry": telemetry,
            "limits": task.limits.model_copy(update={"abandon_s": self.abandon_s}),
            "host_lock": Path(self.lock(work.host)),
        }
        return task.model_copy(update=changed)

    def environment(self, work: NodeWork) -> dict[str, str]:
        """Return the variables that a host's agent is started with."""
        return {
            "PYTHONPATH": str(self.code),
            PLUGINS_VARIABLE: str(self.code / PLUGINS),
            RUN_MARKER: self.run_id,
            NODE_MARKER: str(self.node_dir(work)),
            CACHE_VARIABLE: str(cache_directory()),
        }
