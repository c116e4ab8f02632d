"""Paths of a run's files on its hosts, and jobs with those paths."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.agent.task import AgentTask, NodeJob
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.launchers.ssh.wheel import on_host, path_on_host, wheel
from accelmark.run.record.directory import safe_name
from accelmark.spec.cluster import HostSpec
from accelmark.spec.job import JobSpec


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The directories of one run on its hosts, below the work directory."""

    work: PurePosixPath
    run_id: str
    is_shared: bool = False
    """Whether all hosts share ``work``."""
    abandon_s: float | None = None
    """Longest time that an agent continues without a heartbeat of a coordinator."""
    shared_run: PurePosixPath | None = None
    """The run's directory where all hosts share it: they write to it directly, and nothing is copied."""

    @classmethod
    def of(cls, plan: Plan, run: Path, options: Options) -> Layout:
        """Return the layout of the run at ``run``; its name is unique among the runs of all coordinators."""
        mark = hashlib.sha256(f"{run}\0{plan.created_at}\0{plan.name}".encode()).hexdigest()[:8]
        shared = options.shared_directory
        work = shared / "accelmark" if shared is not None else options.work_directory
        is_shared_run = shared is not None and run.absolute().is_relative_to(shared)
        shared_run = PurePosixPath(run.absolute()) if is_shared_run else None
        return cls(PurePosixPath(work), f"{run.name}-{mark}", shared is not None, options.abandon_s, shared_run)

    @property
    def code(self) -> PurePosixPath:
        """The directory of the unpacked AccelMark."""
        return self.work / "code" / wheel().directory

    @property
    def is_shared_run(self) -> bool:
        """Whether the hosts write to the run's directory directly."""
        return self.shared_run is not None

    @property
    def run(self) -> PurePosixPath:
        """The run's own directory."""
        return self.shared_run or self.work / "runs" / self.run_id

    def lock(self, host: HostSpec) -> PurePosixPath:
        """Return the file that a job locks so that no other run uses the host."""
        return self.work / (f"host-{safe_name(host.address)}.lock" if self.is_shared else "host.lock")

    def node_dir(self, node: NodeJob) -> PurePosixPath:
        """Return a job's directory on its host."""
        round_dir, case = node.node_dir.parent, node.node_dir.parent.parent
        return self.run / case.name / round_dir.name / node.node_dir.name

    def job_file(self, node: NodeJob) -> PurePosixPath:
        """Return the path of the job with the hosts' paths; where the run is shared, it is next to ``job.json``."""
        return self.node_dir(node).parent / ("job.hosts.json" if self.is_shared_run else "job.json")

    def job(self, node: NodeJob) -> JobSpec:
        """Return the job with the paths of a host."""
        job = node.job
        # An evaluation job reads the checkpoints of its round, which is next to it.
        checkpoints = os.path.relpath(job.checkpoint_dir, node.node_dir.parent)
        return job.model_copy(
            update={
                "case": on_host(job.case, self.code),
                "extern": on_host(job.extern, self.code) if job.extern is not None else None,
                "checkpoint_dir": Path(self.node_dir(node).parent / checkpoints),
            }
        )

    def task(self, node: NodeJob) -> AgentTask:
        """Return the agent's task with the paths of a host."""
        task, telemetry = node.task, node.task.telemetry
        if telemetry is not None:
            folder = path_on_host(telemetry.vendor_folder, self.code)
            telemetry = telemetry.model_copy(update={"vendor_folder": folder})
        folders = {"adaptation": task.adaptation, "requirements": task.requirements}
        changed = {
            **{name: path_on_host(path, self.code) for name, path in folders.items() if path is not None},
            "run": self.run_id,
            "job_file": Path(self.job_file(node)),
            "telemetry": telemetry,
            "limits": task.limits.model_copy(update={"abandon_s": self.abandon_s}),
            "host_lock": Path(self.lock(node.host)),
        }
        return task.model_copy(update=changed)
