"""Submit a whole run as a batch job: its coordinator runs on the first node of the allocation."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.launchers import SubmittedJob
from accelmark.run.launchers.slurm.launcher import cancel, request, require_nodes, show_job
from accelmark.run.launchers.slurm.options import WHOLE_NODES, Options
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import options_of

_NUMBER: Final = "# submitted as job "
"""Last line of a script that Slurm has accepted, before the number of the job."""
_PREPARE_S: Final = 600.0
"""Time for data, environment and evaluation of a round, in addition to its time limit."""
_STOP_S: Final = 120
"""The run is asked to stop this time before Slurm's limit, so that its results are kept."""


def submit(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Write ``RUN.sbatch`` and submit it; returns the number of the job, which is added to the script.

    ``arguments`` of AccelMark start the run at ``run``, in the present working directory.

    Raises RequestError: Slurm does not know a host. Raises RunError: Slurm refuses it.
    """
    options = options_of(Options, plan.cluster).slurm_options
    if not any(option.startswith(("--clusters", "-M")) for option in options):
        asyncio.run(require_nodes([host.address for host in plan.cluster.hosts]))  # of this cluster
    make_directory(run.parent)
    script, text = run.with_name(f"{run.name}.sbatch"), batch_script(plan, run, arguments)
    write_atomic(script, text)
    try:
        number = asyncio.run(request(["sbatch", "--parsable", str(script)], options))
    except RunError:
        script.unlink()
        raise
    write_atomic(script, f"{text}{_NUMBER}{number}\n")
    return number


def submitted(run: Path) -> SubmittedJob | None:
    """Return the batch job of a run that has no directory (yet); None where it was not submitted."""
    script, log = run.with_name(f"{run.name}.sbatch"), run.with_name(f"{run.name}.sbatch.log")
    number = script.read_text(encoding="utf-8").rpartition(_NUMBER)[2].strip() if script.is_file() else ""
    if not number.isdecimal():
        return None
    job = asyncio.run(show_job(number))
    may_start = job is not None and (job.is_waiting or job.is_active)
    if job is not None and may_start:
        state = f"queued as Slurm job {job}" if job.is_waiting else f"starting in Slurm job {number}"
    else:
        why = job.end[1] if job is not None and job.end else f"Slurm has no record of job {number} any more"
        state = f"did not start: {why}" + (f"; its output: {log}" if log.is_file() else "")
    return SubmittedJob(number, state, may_start, lambda: asyncio.run(cancel(number)))


def batch_script(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Return the batch script of a run, which inherits the environment.

    ``slurm_options`` of the cluster file take precedence over AccelMark's options.
    """
    hosts = [host.address for host in plan.cluster.hosts]
    limit: list[str] = []
    if plan.timeout_s is not None:
        attempts = len(plan.jobs) * (1 + plan.retry_lost)
        limit = [f"--time={math.ceil((attempts * (plan.timeout_s + _PREPARE_S) + _STOP_S) / 60)}"]
    options = [
        f"--job-name=accelmark-{plan.name}",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        *WHOLE_NODES,
        f"--chdir={Path.cwd()}",
        f"--output={run.with_name(f'{run.name}.sbatch.log')}",
        "--no-requeue",
        f"--signal=B:TERM@{_STOP_S}",
        *limit,
        *options_of(Options, plan.cluster).slurm_options,
    ]
    command = shlex.join([sys.executable, "-m", "accelmark", *arguments])
    return "\n".join(["#!/bin/sh", *(f"#SBATCH {option}" for option in options), f"exec {command}", ""])
