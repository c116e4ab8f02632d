"""Launching in a container on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.agent.environment import agent_commands
from accelmark.run.agent.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.local.localhost import ThisMachine
from accelmark.run.launchers.place import HerePlace, Place
from accelmark.run.launchers.sandbox_of import Enclosure, enclosure_for, model_files, python_inside
from accelmark.run.launchers.step import Step, StepLink, source_directory, tell_here
from accelmark.run.sandboxes.image import have_image
from accelmark.run.sandboxes.sandbox import Inside
from accelmark.spec.catalog import PLUGINS_VARIABLE, find
from accelmark.spec.cluster import HostSpec


@final
class EnclosedLauncher(ThisMachine):
    """Starts agents in containers of this machine that outlive the coordinator."""

    def __init__(self, plan: Plan, run: Path) -> None:
        self._plan = plan
        self._run = run

    def link(self, work: NodeWork) -> StepLink:
        """Return the link for a job's part on this machine."""
        enclosure, agent = enclosure_here(self._plan, work), agent_here(self._run, work)

        async def ready() -> None:
            await make_image(enclosure, work, ())

        return StepLink(
            work, Step(enclosure.sandbox.command("python3", agent), ready, enclosure.sandbox.clean_up(agent.name))
        )

    def describe(self, work: NodeWork) -> list[list[str]]:
        """Return the commands that see to the image, start the container, and start recorder and ranks in it."""
        enclosure = enclosure_here(self._plan, work)
        return [
            *enclosure.having_image(),
            enclosure.sandbox.command("python3", agent_here(self._run, work)),
            *agent_commands(work.task, work.node_dir, python_inside(self._plan)),
        ]

    async def places(self, hosts: Sequence[HostSpec]) -> Sequence[Place]:
        """Return this machine."""
        return [
            HerePlace(host, "127.0.0.1", self.python, str(self._run), self.variables, self._enclosed) for host in hosts
        ]

    def _enclosed(self, work: NodeWork, module: str, arguments: tuple[str, ...]) -> list[str]:
        return command_here(self._plan, self._run, work, module, arguments)


def enclosure_here(plan: Plan, work: NodeWork) -> Enclosure:
    """Return what a job runs in where paths are the same as on this machine."""
    return enclosure_for(plan, work.job, PurePosixPath(source_directory()), find("vendors", plan.vendor).path)


def agent_here(run: Path, work: NodeWork) -> Inside:
    """Return the agent of a job's part, with paths as they are on this machine."""
    plugins = os.environ.get(PLUGINS_VARIABLE, "")
    environment = {RUN_MARKER: work.task.run, NODE_MARKER: str(work.node_dir), "PYTHONPATH": str(source_directory())}
    if plugins:
        environment[PLUGINS_VARIABLE] = plugins
    folders = [
        work.job.case.path.parent,
        *([work.task.telemetry.vendor_folder] if work.task.telemetry is not None else []),
        *(Path(place).absolute() for place in filter(None, plugins.split(os.pathsep))),
    ]
    return Inside(
        module="accelmark.run.agent.agent",
        arguments=(str(work.node_dir),),
        name=f"{run.name}-{work.node_dir.parent.parent.name}-{work.node_dir.parent.name}-{work.task.noderank}",
        environment=environment,
        writable=(run,),
        readable=(*folders, *work.job.data_dirs.values(), *model_files(work.job)),
    )


def command_here(plan: Plan, run: Path, work: NodeWork, module: str, arguments: tuple[str, ...]) -> list[str]:
    """Return the command that runs a module of AccelMark in a job's sandbox, before there are any of its files."""
    agent = agent_here(run, work)
    readable = [path for path in agent.readable if path.is_dir() and path not in work.job.data_dirs.values()]
    inside = replace(agent, module=module, arguments=arguments, name=f"{agent.name}-look", readable=readable)
    return enclosure_here(plan, work).sandbox.command(plan.cluster.python, inside)


async def make_image(enclosure: Enclosure, work: NodeWork, prefix: tuple[str, ...]) -> None:
    """See to it that a job's image is there; ``prefix`` runs commands on another host.

    Raises:
        RunError: it cannot be had.
    """

    async def run(argv: Sequence[str]) -> tuple[int, str]:
        return await tell_here([*prefix, *argv])

    if enclosure.recipe is not None:
        await have_image(enclosure.recipe, work.host.name, run, work.node_dir)
