"""The end of a job whose rank ended itself by SIGKILL, because the job measures recovery."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.cluster import kill_of
from accelmark.run.agent.rank_exit import NodeState
from accelmark.spec.job import JobSpec, TrainJob


def planned_kill(job: JobSpec, round_dir: Path) -> tuple[NodeState, str] | None:
    """Return the state and the reason of a job that was killed as planned; None for others."""
    planned = job.work.killed if isinstance(job.work, TrainJob) else None
    killed = kill_of(round_dir, planned.rank) if planned is not None else None
    if planned is None or killed is None:
        return None
    how = f"rank {planned.rank} on {killed.host} was killed after step {killed.step}"
    return "cancelled", f"{how}, as planned, to measure the recovery"
