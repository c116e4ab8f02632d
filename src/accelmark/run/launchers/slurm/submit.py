"""Submit a whole run as a batch job: its coordinator runs on the first node of the allocation."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.launchers.slurm.job import SlurmJob, cancel, request, require_nodes, show_job
from accelmark.run.launchers.slurm.options import WHOLE_NODES, Options
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import options_of

_NUMBER: Final = "# submitted as job "
"""Last line of a script that Slurm has accepted, before the number of the job."""
_PREPARE_S: Final = 600.0
"""Time for data, environment and evaluation of a round, in addition to its time limit."""
_STOP_S: Final = 120
"""Time before Slurm's limit at which the run is asked to stop, so that its results are kept."""


def submit(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Write ``RUN.sbatch`` and submit it; returns the number of the job, which is added to the script.

    ``arguments`` of AccelMark start the run at ``run``, in the present working directory.

    Raises:
        RequestError: Slurm does not know a host.
        RunError: the script cannot be written, or Slurm refuses it.
    """
    given = options_of(Options, plan.cluster).slurm_options
    if not any(option.startswith(("--clusters", "-M")) for option in given):
        asyncio.run(require_nodes([host.address for host in plan.cluster.hosts]))  # of this cluster
    make_directory(run.parent)
    script, text = _script_of(run), batch_script(plan, run, arguments)
    write_atomic(script, text)
    try:
        number = asyncio.run(request(["sbatch", "--parsable", str(script)], given))
    except RunError:
        script.unlink()
        raise
    write_atomic(script, f"{text}{_NUMBER}{number}\n")
    return number


def submitted(run: Path) -> SubmittedJob | None:
    """Return the batch job of a run that has no directory (yet); None where it was not submitted."""
    try:
        number = _script_of(run).read_text(encoding="utf-8").rpartition(_NUMBER)[2].strip()
    except OSError:
        return None
    return SubmittedJob(number, asyncio.run(show_job(number)), _log_of(run)) if number.isdecimal() else None


@final
@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The batch job of a run that has no directory (yet)."""

    number: str
    job: SlurmJob | None
    """None: Slurm has no record of it any more."""
    log: Path

    @property
    def may_start(self) -> bool:
        """Whether the run may still start."""
        return self.job is not None and (self.job.is_waiting or self.job.is_active)

    def __str__(self) -> str:
        """Return the state of the run."""
        if self.job is not None and self.job.is_waiting:
            return f"queued as Slurm job {self.job}"
        if self.job is not None and self.job.is_active:
            return f"starting in Slurm job {self.number}"
        end = self.job.end if self.job is not None else None
        why = end[1] if end else f"Slurm has no record of job {self.number} any more"
        return f"did not start: {why}" + (f"; its output: {self.log}" if self.log.is_file() else "")

    def cancel(self) -> None:
        """Cancel the job."""
        asyncio.run(cancel(self.number))


def _script_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.sbatch")


def _log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.sbatch.log")


def batch_script(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Return the batch script of a run, which inherits the environment.

    ``slurm_options`` of the cluster file take precedence over its own options.
    """
    hosts = [host.address for host in plan.cluster.hosts]
    limit = [f"--time={minutes}"] if (minutes := time_limit_min(plan)) is not None else []
    options = [
        f"--job-name=accelmark-{plan.name}",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        *WHOLE_NODES,
        f"--chdir={Path.cwd()}",
        f"--output={_log_of(run)}",
        "--no-requeue",
        f"--signal=B:TERM@{_STOP_S}",
        *limit,
        *options_of(Options, plan.cluster).slurm_options,
    ]
    command = shlex.join([sys.executable, "-m", "accelmark", *arguments])
    return "\n".join(["#!/bin/sh", *(f"#SBATCH {option}" for option in options), f"exec {command}", ""])


def time_limit_min(plan: Plan) -> int | None:
    """Return the time that a run may take, in minutes; None where its rounds have no time limit."""
    if plan.timeout_s is None:
        return None
    attempts = 1 + plan.retry_lost
    return math.ceil((len(plan.jobs) * attempts * (plan.timeout_s + _PREPARE_S) + _STOP_S) / 60)
