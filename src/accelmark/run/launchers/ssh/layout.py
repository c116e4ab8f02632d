"""Paths of a run's files on its hosts, and jobs with those paths."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.agent.task import AgentTask, NodeJob
from accelmark.run.launchers.ssh.delivery import on_host, path_on_host, wheel
from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.job import JobSpec


@final
class Layout:
    """The directories of the run at ``run`` on its hosts, below the work directory."""

    def __init__(self, plan: Plan, run: Path, options: Options) -> None:
        self._options = options
        shared = options.shared_directory
        self.run_id = plan.run_id or run.name
        self.work = PurePosixPath(options.work_directory if shared is None else shared / "accelmark")
        self.is_shared_run = shared is not None and run.absolute().is_relative_to(shared)
        """Whether the hosts write to the run's directory directly, so that nothing is copied."""
        self.run = PurePosixPath(run.absolute()) if self.is_shared_run else self.work / "runs" / self.run_id

    @property
    def code(self) -> PurePosixPath:
        """The directory of the unpacked AccelMark."""
        return self.work / "code" / wheel().directory

    def node_dir(self, node: NodeJob) -> PurePosixPath:
        """Return a job's directory on its host: ``<case>/<round>/<node>`` below the run's."""
        return self.run.joinpath(*node.node_dir.parts[-3:])

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
        task = node.task
        changed: dict[str, object] = {
            "run": self.run_id,
            "job_file": Path(self.job_file(node)),
            "limits": task.limits.model_copy(update={"abandon_s": self._options.abandon_s}),
            "locks_host": True,
        }
        for name, path in (("adaptation", task.adaptation), ("requirements", task.requirements), ("case", task.case)):
            changed[name] = path and path_on_host(path, self.code)
        if task.telemetry is not None:
            folder = path_on_host(task.telemetry.vendor_folder, self.code)
            changed["telemetry"] = task.telemetry.model_copy(update={"vendor_folder": folder})
        return task.model_copy(update=changed)
