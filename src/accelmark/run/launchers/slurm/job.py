"""Jobs of Slurm: request, query and cancel them, read how Slurm ended them, and submit a whole run as one."""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import NodeState
from accelmark.run.host import CommandResult, HostError, SubprocessHost
from accelmark.run.launchers import SubmittedJob
from accelmark.run.launchers.slurm.options import WHOLE_NODES, Options
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.plugins.launcher import options_of

_THIS_MACHINE: Final = SubprocessHost(HostSpec(address="localhost"))
_PREFIX: Final = re.compile(r"sbatch: ((error|fatal): )?")
_CANCEL_PAUSES_S: Final = (1.0, 3.0, 9.0, 15.0)
"""Pauses before a job's cancellation is tried again."""
_IS_GONE: Final = re.compile("Invalid job id|already complet")
"""Output of ``scancel`` about a job that has ended."""
_NO_REASON: Final = ("None", "")
_WAITING: Final = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDS: Final[dict[str, tuple[NodeState, str]]] = {
    "CANCELLED": ("cancelled", "was cancelled (scancel)"),
    "TIMEOUT": ("timed_out", "reached its time limit of {limit}: raise --time"),
    "DEADLINE": ("timed_out", "reached its deadline"),
    "NODE_FAIL": ("lost", "ended because a node failed"),
    "BOOT_FAIL": ("lost", "ended because a node did not boot"),
    "PREEMPTED": ("lost", "was preempted"),
    "OUT_OF_MEMORY": ("failed", "used more memory than it was granted: raise --mem"),
    "FAILED": ("lost", "ended early"),
    "COMPLETED": ("lost", "ended early"),
    "COMPLETING": ("cancelled", "is being ended by Slurm (scancel, or its time limit)"),
}
"""Slurm's state of a job -> the state of the jobs that ran in it, and the cause."""


@final
@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as ``scontrol show job`` reports it."""

    job_id: str
    state: str
    reason: str
    time_limit: str
    restarts: int = 0
    """How often Slurm has requeued it."""

    def __str__(self) -> str:
        """Return its number, with Slurm's reason where it has one."""
        return f"{self.job_id} ({self.reason})" if self.reason not in _NO_REASON else self.job_id

    @property
    def is_active(self) -> bool:
        """Whether it holds its nodes."""
        return self.state in ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")

    @property
    def is_waiting(self) -> bool:
        """Whether it may still be granted nodes."""
        return self.state in _WAITING

    @property
    def end(self) -> tuple[NodeState, str] | None:
        """How Slurm ended it; None while it has not ended."""
        if self.state not in _ENDS:
            return None
        state, what = _ENDS[self.state]
        more = "" if state == "cancelled" or self.reason in _NO_REASON else f"; Slurm's reason: {self.reason}"
        return state, f"Slurm job {self.job_id} {what.format(limit=self.time_limit)}{more}"


async def request(sbatch: Sequence[str], arguments: Sequence[str]) -> str:
    """Submit a job with ``sbatch --parsable``, and return its number.

    Raises RunError: Slurm refuses it; has all that it printed, and the options that the cluster file gave.
    """
    done = await _slurm(*sbatch)
    match = re.match(r"(\d+)(;|\s|$)", done.out.decode(errors="replace"))
    if done.code != 0 or match is None:
        printed = [_PREFIX.sub("", line) for line in done.output.splitlines() if not line.startswith("Try ")]
        options = f" (slurm_options in the cluster file: {' '.join(arguments)})" if arguments else ""
        raise RunError(f"Slurm granted no allocation: {'; '.join(printed) or done.message}{options}")
    return match[1]


async def require_nodes(nodes: Iterable[str]) -> None:
    """Check that Slurm knows the nodes, before a job is requested on them; do nothing if Slurm does not answer.

    Raises RequestError, with the unknown nodes and the nodes that exist.
    """
    sinfo = ("sinfo", "--all", "--noheader", "--format=%N")
    done = await _slurm(*sinfo, "--Node")
    known = done.out.decode(errors="replace").split()
    unknown = [node for node in nodes if node not in known]
    if done.code == 0 and known and unknown:
        listed = (await _slurm(*sinfo)).out.decode(errors="replace").split()
        problem = f"Slurm has no node {', '.join(unknown)}; its nodes (sinfo): {', '.join(dict.fromkeys(listed))}"
        raise RequestError(f"{problem}; correct hosts in the cluster file")


async def show_job(job_id: str) -> SlurmJob | None:
    """Return a job; None where Slurm has no record of it: records of ended jobs are kept for MinJobAge, 5 minutes."""
    done = await _slurm("scontrol", "show", "job", "--oneliner", job_id)
    fields = dict(field.partition("=")[::2] for field in done.out.decode(errors="replace").split())
    if done.code != 0 or "JobState" not in fields:
        return None
    restarts = int(fields.get("Restarts", 0))
    return SlurmJob(job_id, fields["JobState"], fields.get("Reason", ""), fields.get("TimeLimit", ""), restarts)


async def node_address(node: str) -> str | None:
    """Return a node's address in Slurm's configuration; None where it has none."""
    done = await _slurm("scontrol", "show", "node", "--oneliner", node)
    return dict(field.partition("=")[::2] for field in done.out.decode(errors="replace").split()).get("NodeAddr")


async def troubled_nodes(nodes: Iterable[str]) -> list[str]:
    """Return a message for each of ``nodes`` that Slurm has taken out of service, with its reason."""
    done = await _slurm("sinfo", "--noheader", "--Node", "--dead", f"--nodes={','.join(nodes)}", "--format=%N %T %E")
    lines = dict.fromkeys(line for line in done.out.decode(errors="replace").splitlines() if line.strip())
    return [f"{node} is {state} ({why.strip()})" for node, state, why in (line.split(" ", 2) for line in lines)]


async def cancel(job_id: str) -> None:
    """Cancel a job; that it has ended is not an error.

    Raises RunError: Slurm does not confirm it; the job still holds its nodes.
    """
    for pause_s in (*_CANCEL_PAUSES_S, 0.0):
        done = await _slurm("scancel", job_id)
        if done.code == 0 or _IS_GONE.search(done.output):
            return
        await asyncio.sleep(pause_s)
    problem = f"Slurm job {job_id} could not be cancelled and holds its nodes: {done.message}"
    raise RunError(f"{problem}; when Slurm answers, run 'scancel {job_id}', or 'accelmark stop' on this run")


async def _slurm(*argv: str) -> CommandResult:
    try:
        return await _THIS_MACHINE.run(argv, timeout_s=None)
    except HostError as error:
        return CommandResult(127, b"", error.what.encode())


_NUMBER: Final = "# submitted as job "
"""Last line of a script that Slurm has accepted, before the number of the job."""
_PREPARE_S: Final = 600.0
"""Time for data, environment and evaluation of a round, in addition to its time limit."""
_STOP_S: Final = 120
"""The run is asked to stop this time before Slurm's limit, so that its results are kept."""


def submit(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Write ``RUN.sbatch`` and submit it; returns the number of the job, which is added to the script.

    ``arguments`` of AccelMark start the run at ``run``, in the present working directory.

    Raises:
        RequestError: Slurm does not know a host.
        RunError: the script cannot be written, or Slurm refuses it.
    """
    options = options_of(Options, plan.cluster).slurm_options
    if not any(option.startswith(("--clusters", "-M")) for option in options):
        asyncio.run(require_nodes([host.address for host in plan.cluster.hosts]))  # of this cluster
    make_directory(run.parent)
    script, text = _script_of(run), batch_script(plan, run, arguments)
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
    try:
        number = _script_of(run).read_text(encoding="utf-8").rpartition(_NUMBER)[2].strip()
    except OSError:
        return None
    if not number.isdecimal():
        return None
    job, log = asyncio.run(show_job(number)), _log_of(run)
    may_start = job is not None and (job.is_waiting or job.is_active)
    if job is not None and may_start:
        state = f"queued as Slurm job {job}" if job.is_waiting else f"starting in Slurm job {number}"
    else:
        why = job.end[1] if job is not None and job.end else f"Slurm has no record of job {number} any more"
        state = f"did not start: {why}" + (f"; its output: {log}" if log.is_file() else "")
    return SubmittedJob(number, state, may_start, lambda: asyncio.run(cancel(number)))


def _script_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.sbatch")


def _log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.sbatch.log")


def batch_script(plan: Plan, run: Path, arguments: Sequence[str]) -> str:
    """Return the batch script of a run, which inherits the environment.

    ``slurm_options`` of the cluster file take precedence over AccelMark's options.
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
