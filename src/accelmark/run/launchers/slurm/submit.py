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
from accelmark.run.launchers.slurm.job import request, require_nodes
from accelmark.run.launchers.slurm.options import WHOLE_NODES, Options
from accelmark.spec.plugins.launcher import options_of

_PREPARE_S: Final = 600.0
"""Time for data, environment and evaluation of a round, in addition to its time limit."""
_STOP_S: Final = 120
"""Time before Slurm's limit at which the run is asked to stop, so that its results are kept."""


def submit(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Write ``RUN.sbatch`` and submit it; returns the number of the job.

    ``arguments`` of AccelMark start the run at ``run``, in the present working directory.

    Raises:
        RequestError: Slurm does not know a host.
        RunError: the script cannot be written, or Slurm refuses it.
    """
    if not any(option.startswith(("--clusters", "-M")) for option in options_of(Options, plan.cluster).slurm_options):
        asyncio.run(require_nodes([host.address for host in plan.cluster.hosts]))  # of this cluster
    make_directory(run.parent)
    script = run.with_name(f"{run.name}.sbatch")
    write_atomic(script, batch_script(plan, run, arguments))
    return asyncio.run(request(["sbatch", "--parsable", str(script)]))


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
        f"--output={run.with_name(f'{run.name}.sbatch.log')}",
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
