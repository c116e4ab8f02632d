"""Launch node agents over SSH: AccelMark is delivered to hosts, and agents outlive connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from accelmark.plan.plan import Plan
from accelmark.run.agent.agent import agent_commands
from accelmark.run.agent.task import NodeJob
from accelmark.run.launchers.host import PreflightHost
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.ssh.agent import SshAgent
from accelmark.run.launchers.ssh.deliver import delivery_command
from accelmark.run.launchers.ssh.hosts import SshHosts
from accelmark.run.launchers.ssh.wheel import wheel
from accelmark.run.onhost import command, start_command
from accelmark.spec.cluster import HostSpec
from accelmark.spec.number_format import duration


@final
class SshLauncher(Launcher):
    """Starts agents on the hosts of a cluster file."""

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self._hosts = SshHosts(plan, run)

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark is unpacked."""
        return self._hosts.variables

    def agent(self, node: NodeJob) -> SshAgent:
        """Return the agent of a job on one host."""
        return SshAgent(node, self._hosts)

    async def hosts(self, specs: Sequence[HostSpec]) -> Sequence[PreflightHost]:
        """Return hosts with the connections of the run."""
        return [self._hosts.preflight_host(spec) for spec in specs]

    def host_command(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command with which OpenSSH's client would run ``argv`` on a host."""
        return self._hosts.connection(host).as_openssh(argv)

    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return the commands over SSH, and those that the agent starts."""
        hosts, layout = self._hosts, self._hosts.layout
        node_dir, data = layout.node_dir(node), hosts.data_command(node)
        commands = [
            delivery_command(self.python, wheel(), layout.code),
            *hosts.sandbox(node).image_commands(),
            command(self.python, "clear", str(layout.run), str(node_dir)),
            command(self.python, "receive", "files"),
            *([data] if data is not None else []),
            start_command(str(node_dir), hosts.agent_command(node)),
            command(self.python, "follow", str(node_dir)),
        ]
        started = agent_commands(layout.task(node), Path(node_dir), self.rank_python)
        return [*(self.host_command(node.host, argv) for argv in commands), *started]

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run on hosts; unreachable ones end by themselves without heartbeats."""
        left = duration(self._hosts.options.abandon_s)
        problems = await self._hosts.end_stale_agents(specs)
        return [f"{problem}; agents there end by themselves after {left} without a coordinator" for problem in problems]

    async def close(self) -> None:
        """End agents on lost hosts where possible, and close all connections."""
        await self._hosts.close()


create = SshLauncher
