"""Launch node agents on this machine, as processes or in containers."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import final

from accelmark.run.agent.agent import agent_commands
from accelmark.run.agent.task import AGENT_MODULE, NodeJob
from accelmark.run.launchers.shared_filesystem import CommandAgent, SharedFilesystemLauncher, agent_markers
from accelmark.run.processes import sweep
from accelmark.spec.cluster import HostSpec


@final
class LocalLauncher(SharedFilesystemLauncher):
    """Starts agents on this machine."""

    @property
    def python(self) -> str:
        """The Python that runs this program; containers have their own."""
        return sys.executable

    def master_address(self, host: HostSpec) -> str:
        """Return the loopback address; containers use the host's network."""
        return "127.0.0.1"

    def agent(self, node: NodeJob) -> CommandAgent:
        """Return the agent of a job."""
        return local_agent(node) if self.plan.cluster.container is None else super().agent(node)

    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return the commands that start the agent, and those that the agent starts."""
        if self.plan.cluster.container is not None:
            return super().job_commands(node)
        return [agent_command(node), *agent_commands(node.task, node.node_dir)]


create = LocalLauncher


def local_agent(node: NodeJob) -> CommandAgent:
    """Return the agent of a job that runs on this machine without a container; no plan is needed."""

    async def clean_up() -> int:
        return await asyncio.to_thread(sweep, node.node_dir)

    return CommandAgent(node, lambda: agent_command(node), clean_up=clean_up)


def agent_command(node: NodeJob) -> list[str]:
    """Return the command that starts an agent with the Python and the environment of this process."""
    variables = agent_markers(node)
    if "PYTHONPATH" in os.environ:  # relative entries would be wrong in the agent's working directory
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries if entry)  # noqa: PTH100
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, "-m", AGENT_MODULE, str(node.node_dir)]
