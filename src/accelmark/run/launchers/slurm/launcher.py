"""Launch node agents as steps of a Slurm allocation: the current one, or one that is requested and returned.

The run directory has to be on a file system that all nodes share.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.host import CommandResult, HostError, SubprocessHost
from accelmark.run.launchers.shared_filesystem import SharedFilesystemLauncher
from accelmark.run.launchers.slurm.options import Options
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import options_of

ALLOCATION_FILE: Final = "slurm.job"
"""In the run directory while the run holds an allocation that it requested: its job number."""
_JOB_VARIABLE: Final = "SLURM_JOB_ID"
_THIS_MACHINE: Final = SubprocessHost(HostSpec(address="localhost"))


@final
class SlurmLauncher(SharedFilesystemLauncher):
    """Starts agents as job steps, one for each host."""

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self._options = options_of(Options, plan.cluster)
        self._allocating = asyncio.Lock()
        self._is_own = _JOB_VARIABLE not in os.environ
        self._job_id = os.environ.get(_JOB_VARIABLE) or self._saved_job_id()

    def _saved_job_id(self) -> str | None:
        try:
            return (self.run / ALLOCATION_FILE).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def prefix(self, host: HostSpec) -> tuple[str, ...]:
        """Return the ``srun`` that runs a step on one node; ``JOBID`` if no allocation is requested yet."""
        node = ("--nodes=1", "--ntasks=1", f"--nodelist={host.address}", "--overlap", "--export=ALL")
        return ("srun", f"--jobid={self._job_id or 'JOBID'}", *node, "--kill-on-bad-exit=0")

    async def allocate(self) -> None:
        """Request an allocation of all hosts of the cluster file, once."""
        async with self._allocating:
            if self._job_id is not None and await _is_active(self._job_id):
                return
            if not self._is_own:
                raise RunError(f"the Slurm allocation {self._job_id} has ended")
            done = await _slurm(*self._salloc())
            job_id = await _newest(self._job_name)
            if done.code != 0 or job_id is None or not await _is_active(job_id):
                raise RunError(f"Slurm granted no allocation: {done.message}")
            self._job_id = job_id
            write_atomic(self.run / ALLOCATION_FILE, job_id)

    @property
    def _job_name(self) -> str:
        return f"accelmark-{self.plan.name}"

    def _salloc(self) -> list[str]:
        hosts = self.plan.cluster.hosts
        nodes = [f"--nodes={len(hosts)}", "--nodelist=" + ",".join(host.address for host in hosts)]
        return ["salloc", "--no-shell", f"--job-name={self._job_name}", *nodes, *self._options.slurm_options]

    def allocation_commands(self) -> list[list[str]]:
        """Return the request for an allocation, where there is none."""
        return [] if self._job_id is not None else [self._salloc()]

    def master_address(self, host: HostSpec) -> str:
        """Return the node's address in Slurm's configuration."""
        try:
            shown = subprocess.run(
                ["scontrol", "show", "node", "--oneliner", host.address], capture_output=True, text=True, check=False
            ).stdout
        except FileNotFoundError:
            return host.address
        fields = dict(field.partition("=")[::2] for field in shown.split())
        return fields.get("NodeAddr", host.address)

    async def close(self) -> None:
        """Cancel an allocation that was requested here."""
        if self._is_own and self._job_id is not None:
            await _slurm("scancel", self._job_id)
            (self.run / ALLOCATION_FILE).unlink(missing_ok=True)


create = SlurmLauncher


async def _slurm(*argv: str) -> CommandResult:
    try:
        return await _THIS_MACHINE.run(argv, timeout_s=None)
    except HostError as error:
        return CommandResult(127, b"", error.what.encode())


async def _is_active(job_id: str) -> bool:
    done = await _slurm("squeue", "--noheader", "--jobs", job_id, "--format=%T")
    return done.code == 0 and done.out.split()[-1:] in ([b"RUNNING"], [b"CONFIGURING"])


async def _newest(name: str) -> str | None:
    done = await _slurm("squeue", "--noheader", "--me", f"--name={name}", "--sort=i", "--format=%i")
    last = done.out.decode().split()[-1:]
    return last[0] if done.code == 0 and last and last[0].isdigit() else None
