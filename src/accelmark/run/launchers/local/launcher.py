"""Launch node agents on this machine, as processes or in containers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import final

from accelmark.run import onhost
from accelmark.run.agent.task import AGENT_MODULE, NodeJob
from accelmark.run.host import SubprocessHost
from accelmark.run.launchers.shared_filesystem import (
    CommandAgent,
    SharedFilesystemLauncher,
    agent_markers,
    write_task,
)
from accelmark.run.sandboxes.sandbox import ModuleCommand, Sandbox
from accelmark.spec.cluster import HostSpec


@final
class LocalLauncher(SharedFilesystemLauncher):
    """Starts agents on this machine."""

    @property
    def python(self) -> str:
        """The Python that runs this program; containers have their own."""
        return sys.executable

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark is in containers; other processes inherit this one's environment."""
        return _python_path() if self.plan.cluster.container is None else super().variables

    async def master_address(self, host: HostSpec) -> str:
        """Return the loopback address; containers use the host's network."""
        return "127.0.0.1"


create = LocalLauncher


def local_agent(node: NodeJob) -> CommandAgent:
    """Return the agent of a job that runs on this machine without a container; no plan is needed."""
    variables, place, sandbox = _python_path(), (str(node.node_dir),), Sandbox()
    agent = ModuleCommand(AGENT_MODULE, place, "", {**agent_markers(node), **variables})
    sweep = ModuleCommand("accelmark.run.processes", place, "", variables)
    command, clean_up = (sandbox.command(sys.executable, module) for module in (agent, sweep))

    async def prepare() -> None:
        write_task(node)

    look = onhost.command(sys.executable, "state", *place)
    return CommandAgent(node, SubprocessHost(node.host), command, clean_up, look, prepare)


def _python_path() -> dict[str, str]:
    """Return ``PYTHONPATH``, where it is set, for another working directory than this process's."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = os.pathsep.join(os.path.abspath(entry) for entry in entries)  # noqa: PTH100
    return {"PYTHONPATH": absolute} if absolute else {}
