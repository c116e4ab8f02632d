"""Launch node agents as steps of a Slurm allocation: the current allocation, or a requested allocation.

The run directory must be on a file system that all nodes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.run.agent.rank_exit import NodeState, explained, signal_name
from accelmark.run.agent.task import AGENT_LOG, CODE_FILE, IDENTITY_FILE, LOCK_FILE, NodeJob
from accelmark.run.host import CommandResult, HostError, SubprocessHost
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.shared_filesystem import POLL_S, CommandAgent, SharedFilesystemLauncher
from accelmark.run.launchers.slurm.options import WHOLE_NODES, Options
from accelmark.run.onhost.program import is_locked
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, RunError, raising
from accelmark.spec.plugins.launcher import options_of

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


class _SlurmJob(NamedTuple):
    """A job as ``scontrol show job`` reports it."""

    job_id: str
    state: str
    reason: str
    time_limit: str
    restarts: int = 0
    """How often Slurm has requeued it."""

    def __str__(self) -> str:
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


async def show_job(job_id: str) -> _SlurmJob | None:
    """Return a job; None where Slurm has no record of it: records of ended jobs are kept for MinJobAge, 5 minutes."""
    done = await _slurm("scontrol", "show", "job", "--oneliner", job_id)
    fields = dict(field.partition("=")[::2] for field in done.out.decode(errors="replace").split())
    if done.code != 0 or "JobState" not in fields:
        return None
    restarts = int(fields.get("Restarts", 0))
    return _SlurmJob(job_id, fields["JobState"], fields.get("Reason", ""), fields.get("TimeLimit", ""), restarts)


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
        return await SubprocessHost(HostSpec(address="localhost")).run(argv, timeout_s=None)
    except HostError as error:
        return CommandResult(127, b"", error.what.encode())


_SCRIPT_FILE: Final = "step.sh"
_LOG_FILE: Final = "step.log"
"""In the directory of a job's first host: the script that ``srun`` runs on every host, and its output."""
_END_S: Final = 60.0
"""Longest time from the end of all agents to the end of ``srun``: longer than Slurm's KillWait (30 s)."""
_SCRIPT: Final = """\
case "$SLURMD_NODENAME" in
{cases}
*) echo "accelmark: error: the job has no agent for node $SLURMD_NODENAME" >&2; exit 92;;
esac
trap : HUP INT TERM  # Slurm sends signals to the agent, too, which ends its ranks first
"$@" >>{log} 2>&1 </dev/null
code=$?
echo $code >{ended}
exit $code
"""


def script_of(agents: Sequence[CommandAgent]) -> str:
    """Return the shell script that runs, on each host, the command of its agent."""
    cases = "\n".join(
        f"{shlex.quote(agent.node.host.address)}) "
        f"cd {shlex.quote(str(agent.node.node_dir))} && set -- {shlex.join(agent.command)} || exit;;"
        for agent in agents
    )
    return _SCRIPT.format(cases=cases, log=AGENT_LOG, ended=CODE_FILE)


class _JobStep:
    """The ``srun`` of a job: ``prefix`` has its arguments, after there is an allocation."""

    def __init__(self, prefix: Callable[[], Sequence[str]], directory: Path) -> None:
        self._prefix = prefix
        self.log = directory / _LOG_FILE
        self.agents: list[_StepAgent] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._num_ended = 0
        self._is_noted = False

    @property
    def command(self) -> list[str]:
        first = self.agents[0]
        return [*self._prefix(), *first.sandbox.step_options(first.module), "sh", str(self.log.with_name(_SCRIPT_FILE))]

    def start(self) -> None:
        """Start it, once; raises RunError if ``srun`` is not on the PATH."""
        if self.process is not None:
            return
        write_atomic(self.log.with_name(_SCRIPT_FILE), script_of(self.agents), private=True)
        for agent in self.agents:
            (agent.node.node_dir / AGENT_LOG).touch()
        missing = raising(RunError, f"{self.command[0]} is not on the PATH", FileNotFoundError)
        with write_errors(self.log), self.log.open("wb") as output, missing:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    async def left_by_one(self) -> None:
        """Count the end of an agent; with the last one, wait for the end of ``srun``."""
        assert self.process is not None  # noqa: S101  its agents were started
        code = self.process.poll()
        if code is not None and code < 0 and not self._is_noted:  # it was killed, and could not write that itself
            self._is_noted = True
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"srun: was killed by {signal_name(code)}\n")
        self._num_ended += 1
        if self._num_ended < len(self.agents):
            return
        deadline = time.monotonic() + _END_S
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self.process.poll() is None:
            self.process.kill()


class _StepAgent(CommandAgent):
    def __init__(self, launcher: Launcher, node: NodeJob, step: _JobStep) -> None:
        super().__init__(launcher, node)
        self.step = step

    def commands(self) -> list[list[str]]:
        """Return the commands that ensure the image by steps of one node, and those that the job's step starts."""
        agent = [*self.command]
        return [agent if argv[-len(agent) :] == agent else argv for argv in super().commands()]

    async def start(self) -> None:
        self.step.start()

    async def wait_for_end(self) -> None:
        """Wait until the agent has ended, although ``srun`` runs as long as the agents of other hosts do."""
        if self.step.process is None:  # an earlier coordinator started it
            await super().wait_for_end()
            return
        while not await asyncio.to_thread(self._has_ended):
            await asyncio.sleep(max(POLL_S, len(self.step.agents) / 256))  # at most 256 hosts are looked at in a second
        await self.step.left_by_one()

    def _has_ended(self) -> bool:
        directory, srun = self.node.node_dir, self.step.process
        if (directory / CODE_FILE).exists() or srun is None or srun.poll() is not None:
            return True
        return (directory / IDENTITY_FILE).exists() and not is_locked(str(directory / LOCK_FILE))

    @property
    def logs(self) -> tuple[Path, ...]:
        return (*super().logs, self.step.log)


ALLOCATION_FILE: Final = "slurm.job"
"""In the run directory while the run holds, or waits for, an allocation that it requested: its job number."""
_JOB_VARIABLE: Final = "SLURM_JOB_ID"
_POLL_S: Final = (0.2, 10.0)
"""First and longest pause between two queries of a job that waits in the queue."""


class _SlurmLauncher(SharedFilesystemLauncher):
    """Starts the agents of a job on all of its hosts as one job step."""

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self._options = options_of(Options, plan.cluster)
        self._allocating = asyncio.Lock()
        self._is_own = _JOB_VARIABLE not in os.environ
        self._was_granted = False
        self._restarts = 0
        self._job_id = os.environ.get(_JOB_VARIABLE)
        if self._job_id is None and (run / ALLOCATION_FILE).exists():
            self._job_id = (run / ALLOCATION_FILE).read_text(encoding="utf-8").strip() or None
        self._addresses: dict[str, str] = {}

    def prefix(self, *hosts: HostSpec) -> tuple[str, ...]:
        """Return the ``srun`` that runs a step, once on each node; ``JOBID`` if no allocation is requested yet."""
        number, names = len(hosts), ",".join(host.address for host in hosts)
        nodes = (f"--nodes={number}", f"--ntasks={number}", f"--nodelist={names}", "--overlap", "--export=ALL")
        return ("srun", f"--jobid={self._job_id or 'JOBID'}", *nodes, "--kill-on-bad-exit=0", "--wait=0")

    def agents(self, nodes: Sequence[NodeJob]) -> Sequence[_StepAgent]:
        step = _JobStep(lambda: self.prefix(*(node.host for node in nodes)), nodes[0].node_dir)
        step.agents = [_StepAgent(self, node, step) for node in nodes]
        return step.agents

    def common_commands(self, nodes: Sequence[NodeJob]) -> list[list[str]]:
        return [self.agents(nodes)[0].step.command]

    async def allocate(self) -> None:
        """Request an allocation of all hosts of the cluster file, once, and wait until Slurm grants it.

        Raises RunError: Slurm refuses it, or it was cancelled; an allocation that ended otherwise is requested again.
        """
        async with self._allocating:
            if not self._was_granted:
                nodes = [host.address for host in self.plan.cluster.hosts]
                await require_nodes(nodes)
                if not self._is_own:
                    self._options.require_allocated(nodes)
            job = await show_job(self._job_id) if self._job_id is not None else None
            if job is None or not (job.is_active or job.is_waiting):
                if not self._is_own:
                    raise RunError(f"the Slurm allocation {self._job_id} has ended")
                if job is not None and self._was_granted and job.end is not None and job.end[0] == "cancelled":
                    raise RunError(job.end[1])
                await self._request()
            await self._wait_until_granted()
            self._was_granted = True

    async def _request(self) -> None:
        requesting = asyncio.ensure_future(request(self._command(), self._options.slurm_options))
        try:
            await asyncio.shield(requesting)
        finally:
            self._job_id = await requesting
            write_atomic(self.run / ALLOCATION_FILE, self._job_id)

    async def _wait_until_granted(self) -> None:
        assert self._job_id is not None  # noqa: S101  both callers have one
        pause_s, told = _POLL_S[0], ""
        while True:
            job = await show_job(self._job_id)
            if job is None or not (job.is_active or job.is_waiting):
                end = job.end if job is not None else None
                raise RunError(end[1] if end else f"Slurm job {self._job_id} is gone: Slurm granted no allocation")
            if job.is_active:
                self._restarts = job.restarts
                return
            if job.reason != told and pause_s > _POLL_S[0]:
                told = job.reason
                self.report(f"waiting for Slurm job {job}")
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S[1])

    def _command(self) -> list[str]:
        hosts = self.plan.cluster.hosts
        nodes = [f"--nodes={len(hosts)}", "--nodelist=" + ",".join(host.address for host in hosts)]
        holder = ["--no-requeue", "--output=/dev/null", "--wrap=exec sleep infinity"]
        name = f"--job-name=accelmark-{self.plan.name}"
        return ["sbatch", "--parsable", name, *nodes, *WHOLE_NODES, *holder, *self._options.slurm_options]

    def allocation_commands(self) -> list[list[str]]:
        return [] if self._job_id is not None else [self._command()]

    async def allocation_end(self) -> tuple[NodeState, str] | None:
        if self._job_id is None:
            return None
        give_up = time.monotonic() + 90.0  # longer than Slurm's KillWait (30 s)
        # Slurm hides the state until all processes have ended. Inside the allocation, this process is one of them.
        while (job := await show_job(self._job_id)) is not None and job.state == "COMPLETING" and self._is_own:
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(0.5)
        if job is not None and job.restarts > self._restarts:
            return "lost", explained(f"Slurm job {self._job_id} was requeued by a user or by Slurm")
        if job is None or job.end is None:
            return None
        state, reason = job.end
        if state == "lost":  # with the nodes that Slurm has taken out of service
            nodes = f"--nodes={','.join(host.address for host in self.plan.cluster.hosts)}"
            dead = await _slurm("sinfo", "--noheader", "--Node", "--dead", nodes, "--format=%N is %T (%E)")
            reason = "; ".join([reason, *dict.fromkeys(dead.out.decode(errors="replace").splitlines())])
        return state, reason

    async def master_address(self, host: HostSpec) -> str:
        if host.address not in self._addresses:
            done = await _slurm("scontrol", "show", "node", "--oneliner", host.address)
            match = re.search(r"\bNodeAddr=(\S+)", done.out.decode(errors="replace"))
            self._addresses[host.address] = match[1] if match is not None else host.address
        return self._addresses[host.address]

    async def close(self) -> None:
        """Cancel an allocation that was requested here, granted or not.

        Raises RunError: Slurm does not confirm it; its number stays in the run directory, for ``stop``.
        """
        if self._is_own and self._job_id is not None and not self.leaves_ranks:
            await cancel(self._job_id)
            (self.run / ALLOCATION_FILE).unlink(missing_ok=True)

    def abort(self) -> None:
        if self._is_own and self._job_id is not None:
            with contextlib.suppress(OSError):
                subprocess.Popen(["scancel", self._job_id], start_new_session=True)


create = _SlurmLauncher
