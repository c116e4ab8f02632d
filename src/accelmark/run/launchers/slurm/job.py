"""Jobs of Slurm: request, query and cancel them, and read how Slurm ended them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from accelmark.run.agent.rank_exit import NodeState
from accelmark.run.host import CommandResult, HostError, SubprocessHost
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, RunError

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
