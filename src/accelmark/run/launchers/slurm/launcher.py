"""Launching through Slurm: inside an allocation, or in one that is asked for and given back.

The run directory has to be on a file system that all nodes see, as is the rule on Slurm clusters.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.environment import agent_commands
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.local.container import agent_here, command_here, enclosure_here, make_image
from accelmark.run.launchers.place import HerePlace, Place
from accelmark.run.launchers.sandbox_of import python_inside
from accelmark.run.launchers.step import Step, StepLink, run_here, source_directory
from accelmark.run.record.directory import PLAN_FILE
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.evidence import ALLOCATION_FILE

_JOB_VARIABLE: Final = "SLURM_JOB_ID"


@final
class SlurmLauncher:
    """Starts agents as job steps, one for each host."""

    fetches_here = True

    def __init__(self, plan: Plan, run: Path) -> None:
        self._plan = plan
        self._run = run
        self._getting = asyncio.Lock()
        self._job_id = os.environ.get(_JOB_VARIABLE) or self._kept()
        self._is_own = _JOB_VARIABLE not in os.environ

    def _kept(self) -> str | None:
        try:
            return (self._run / ALLOCATION_FILE).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def link(self, work: NodeWork) -> StepLink:
        """Return the link for a job's part on one node; its step is known once there is an allocation."""
        enclosure, agent = enclosure_here(self._plan, work), agent_here(self._run, work)
        command = enclosure.sandbox.command(self._plan.cluster.python, agent)
        by_force = enclosure.sandbox.clean_up(agent.name)
        argv = [*self._srun(work.host), *command]
        clean_up = [*self._srun(work.host), *by_force] if by_force else None

        async def ready() -> None:
            await self._allocate()
            argv[:] = [*self._srun(work.host), *command]
            if clean_up is not None:
                clean_up[:] = [*self._srun(work.host), *(by_force or ())]
            await make_image(enclosure, work, tuple(self._srun(work.host)))

        return StepLink(work, Step(argv, ready, clean_up))

    def _srun(self, host: HostSpec, job_id: str | None = None) -> list[str]:
        job_id = job_id or self._job_id
        allocation = [f"--jobid={job_id}"] if job_id else []
        node = ["--nodes=1", "--ntasks=1", f"--nodelist={host.address}", "--overlap", "--export=ALL"]
        return ["srun", *allocation, *node, "--kill-on-bad-exit=0"]

    async def _allocate(self) -> None:
        """Have an allocation of all hosts of the cluster file, once.

        Raises:
            RunError: Slurm gives none.
        """
        async with self._getting:
            if self._job_id is not None and await _lives(self._job_id):
                return
            if not self._is_own:
                raise RunError(f"the allocation {self._job_id} has ended")
            code, said = await run_here(self._salloc())
            job_id = await _newest(self._job_name)
            if code != 0 or job_id is None or not await _lives(job_id):
                raise RunError(f"Slurm gives no allocation: {said}")
            self._job_id = job_id
            write_atomic(self._run / ALLOCATION_FILE, job_id)

    @property
    def _job_name(self) -> str:
        return f"accelmark-{self._plan.name}"

    def _salloc(self) -> list[str]:
        hosts = self._plan.cluster.hosts
        nodes = [f"--nodes={len(hosts)}", "--nodelist=" + ",".join(host.address for host in hosts)]
        return ["salloc", "--no-shell", f"--job-name={self._job_name}", *nodes, *self._plan.cluster.slurm_options]

    @property
    def python(self) -> str:
        """The Python of the cluster file."""
        return self._plan.cluster.python

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where this AccelMark is, which all nodes see."""
        return {"PYTHONPATH": str(source_directory())}

    def first(self) -> list[list[str]]:
        """Return the request for an allocation, where there is none."""
        return [] if self._job_id is not None else [self._salloc()]

    def on(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command as a step on one node; ``JOBID`` stands for an allocation that is not there yet."""
        return [*self._srun(host, self._job_id or "JOBID"), *argv]

    def describe(self, work: NodeWork) -> list[list[str]]:
        """Return the steps that see to the image and start the agent, and what the agent starts."""
        enclosure = enclosure_here(self._plan, work)
        steps = [*enclosure.having_image(), enclosure.sandbox.command(self.python, agent_here(self._run, work))]
        inside = agent_commands(work.task, work.node_dir, python_inside(self._plan))
        return [*(self.on(work.host, step) for step in steps), *inside]

    def master_address(self, host: HostSpec) -> str:
        """Return the address that Slurm has for the node."""
        try:
            shown = subprocess.run(
                ["scontrol", "show", "node", "--oneliner", host.address], capture_output=True, text=True, check=False
            ).stdout
        except FileNotFoundError:
            return host.address
        fields = dict(field.partition("=")[::2] for field in shown.split())
        return fields.get("NodeAddr", host.address)

    def environment(self) -> Mapping[str, str]:
        """Return nothing: the agent itself finds the interface to the other hosts."""
        return {}

    async def places(self, hosts: Sequence[HostSpec]) -> Sequence[Place]:
        """Return nodes of the allocation, which is asked for where there is none; the run goes on in the same one.

        Raises:
            RunError: Slurm gives none.
        """
        await self._allocate()
        return [
            HerePlace(
                host,
                self.master_address(host),
                self._plan.cluster.python,
                str(self._run),
                self.variables,
                self._enclosed,
                prefix=tuple(self._srun(host)),
                shown=self._run / PLAN_FILE,
            )
            for host in hosts
        ]

    def _enclosed(self, work: NodeWork, module: str, arguments: tuple[str, ...]) -> list[str]:
        return command_here(self._plan, self._run, work, module, arguments)

    async def tidy(self, hosts: Sequence[HostSpec]) -> list[str]:
        """Do nothing: what runs in an allocation ends with it."""
        return []

    async def close(self) -> None:
        """Give back an allocation that was asked for here."""
        if self._is_own and self._job_id is not None:
            await run_here(["scancel", self._job_id])
            (self._run / ALLOCATION_FILE).unlink(missing_ok=True)


async def _lives(job_id: str) -> bool:
    code, said = await run_here(["squeue", "--noheader", "--jobs", job_id, "--format=%T"])
    return code == 0 and said.strip() in ("RUNNING", "CONFIGURING")


async def _newest(name: str) -> str | None:
    code, said = await run_here(["squeue", "--noheader", "--me", f"--name={name}", "--sort=i", "--format=%i"])
    return said.strip() if code == 0 and said.strip().isdigit() else None
