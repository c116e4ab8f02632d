"""Launching over SSH: nothing is shared, AccelMark is brought along, agents outlive the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.environment import agent_commands
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.place import Place
from accelmark.run.launchers.sandbox_of import Enclosure, enclosure_for, model_files, python_inside
from accelmark.run.launchers.ssh.connection import HostError, SshHost
from accelmark.run.launchers.ssh.deliver import deliver, delivery
from accelmark.run.launchers.ssh.layout import Layout
from accelmark.run.launchers.ssh.link import LONGEST_PAUSE_S, STOP_PATIENCE_S, SshLink
from accelmark.run.launchers.ssh.place import SshPlace
from accelmark.run.launchers.ssh.wheel import PLUGINS, path_on_host, wheel
from accelmark.run.onhost import command, start_command
from accelmark.run.sandboxes.image import have_image
from accelmark.run.sandboxes.sandbox import Inside
from accelmark.spec.catalog import PLUGINS_VARIABLE, find
from accelmark.spec.cluster import HostSpec
from accelmark.spec.evidence import DATA_FILE

_IMAGE_TIMEOUT_S: Final = 3600.0
_TIDY_PATIENCE_S: Final = 90.0


@final
class SshLauncher:
    """Starts agents on the hosts of a cluster file."""

    fetches_here = False

    def __init__(self, plan: Plan, run: Path) -> None:
        self.plan = plan
        self.layout = Layout.of(plan, run)
        self._hosts = {host.name: SshHost(host, plan.cluster) for host in plan.cluster.hosts}
        self._delivered: dict[str, asyncio.Lock] = {}
        self._have: set[str] = set()
        self._clearing = {name: asyncio.Lock() for name in self._hosts}
        self._given_up: dict[str, set[PurePosixPath]] = {}
        """Node directories on hosts that were lost, whose agents may still live there."""
        self._pursuits: set[asyncio.Task[None]] = set()
        self._data: dict[Path, tuple[str, str]] = {}
        """For each round the host that was the first to have its data, and what it found."""

    def host(self, host: HostSpec) -> SshHost:
        """Return the connection of a host."""
        return self._hosts[host.name]

    def link(self, work: NodeWork) -> SshLink:
        """Return the link for a job's part on one host."""
        return SshLink(work, self)

    def enclosure(self, work: NodeWork) -> Enclosure:
        """Return what a job runs in on its host."""
        folder = find("vendors", self.plan.vendor).path
        code = self.layout.code
        return enclosure_for(self.plan, work.job, code, path_on_host(folder, "vendors", code))

    def describe(self, work: NodeWork) -> list[list[str]]:
        """Return the commands that would be run there: over SSH, and by the agent."""
        layout, node_dir, host = self.layout, self.layout.node_dir(work), self.host(work.host)
        enclosure, data = self.enclosure(work), self.data_command(work)
        commands = [
            delivery(self.python, wheel(), layout.code),
            *enclosure.having_image(),
            command(self.python, "clear", str(layout.run), str(node_dir)),
            command(self.python, "receive", "files"),
            *([data] if data is not None else []),
            start_command(str(node_dir), enclosure.sandbox.command(self.python, self.agent(work))),
            command(self.python, "follow", str(node_dir)),
        ]
        inside = agent_commands(layout.task(work), Path(node_dir), python_inside(self.plan))
        return [*(host.as_openssh(argv) for argv in commands), *inside]

    @property
    def python(self) -> str:
        """The Python of the cluster file."""
        return self.plan.cluster.python

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark is unpacked."""
        code = self.layout.code
        return {"PYTHONPATH": str(code), PLUGINS_VARIABLE: str(code / PLUGINS)}

    def first(self) -> list[list[str]]:
        """Return nothing: hosts are there."""
        return []

    def on(self, host: HostSpec, argv: Sequence[str]) -> list[str]:
        """Return the command as openssh's client would run it there."""
        return self.host(host).as_openssh(argv)

    def data_command(self, work: NodeWork) -> list[str] | None:
        """Return the command that sees on a host to the job's data, None where it needs none."""
        dirs = list(work.job.data_dirs.values())
        if not dirs:
            return None
        layout, agent = self.layout, self.agent(work)
        in_container = self.plan.cluster.container is not None
        places = [path.parent if in_container or not path.is_dir() else path for path in dirs]
        inside = Inside(
            module="accelmark.run.agent.fetch_data",
            arguments=(str(layout.job_file(work)), *(("--offline",) if self.plan.offline else ())),
            name=f"{agent.name}-data",
            environment=agent.environment,
            writable=(Path(layout.work), *places),
        )
        return self.enclosure(work).sandbox.command(self.python, inside)

    def agent(self, work: NodeWork) -> Inside:
        """Return the agent of a job's part as a command for its sandbox."""
        layout = self.layout
        return Inside(
            module="accelmark.run.agent.agent",
            arguments=(str(layout.node_dir(work)),),
            name=f"{layout.run_id}-{work.node_dir.parent.parent.name}-{work.node_dir.parent.name}-{work.task.noderank}",
            environment=layout.environment(work),
            writable=(Path(layout.work), Path(layout.run)),
            readable=(*work.job.data_dirs.values(), *model_files(work.job)),
        )

    def master_address(self, host: HostSpec) -> str:
        """Return the address that the cluster file gives the host."""
        return host.address

    def environment(self) -> Mapping[str, str]:
        """Return nothing: the agent itself finds the interface to the other hosts."""
        return {}

    async def ready(self, work: NodeWork) -> None:
        """See to it, once a host, that AccelMark and the image are there.

        Raises:
            RunError: they cannot be had.
        """
        host, enclosure = self.host(work.host), self.enclosure(work)
        await self._bring(host)
        async with self._delivered.setdefault(host.name, asyncio.Lock()):
            recipe = enclosure.recipe
            if recipe is None or f"{host.name} {recipe.name}" in self._have:
                return

            async def run(argv: Sequence[str]) -> tuple[int, str]:
                done = await host.run(argv, timeout_s=_IMAGE_TIMEOUT_S)
                return done.code, (done.out + done.err).decode(errors="replace")

            await have_image(recipe, host.name, run, work.node_dir)
            self._have.add(f"{host.name} {recipe.name}")

    async def _bring(self, host: SshHost) -> None:
        """See to it, once a host, that AccelMark is there.

        Raises:
            HostError: it cannot be had.
        """
        async with self._delivered.setdefault(host.name, asyncio.Lock()):
            if f"{host.name} code" not in self._have:
                await deliver(host, self.plan.cluster.python, wheel(), self.layout.code)
                self._have.add(f"{host.name} code")

    async def places(self, hosts: Sequence[HostSpec]) -> Sequence[Place]:
        """Return hosts through the connections that the run itself uses."""
        found = []
        for connection in map(self.host, hosts):
            bring = partial(self._bring, connection)
            found.append(SshPlace(connection, self.layout, self.python, self.variables, bring, self._enclosed))
        return found

    def _enclosed(self, work: NodeWork, module: str, arguments: tuple[str, ...]) -> list[str]:
        agent = self.agent(work)
        inside = replace(agent, module=module, arguments=arguments, name=f"{agent.name}-look", readable=())
        return self.enclosure(work).sandbox.command(self.plan.cluster.python, inside)

    async def tidy(self, hosts: Sequence[HostSpec]) -> list[str]:
        """End agents of this run on hosts; returns, for people, which hosts did not answer."""
        argv = command(self.plan.cluster.python, "clear", str(self.layout.run), "")

        async def end(host: SshHost) -> str | None:
            try:
                done = await asyncio.wait_for(host.run(argv, timeout_s=None), _TIDY_PATIENCE_S)
            except (HostError, TimeoutError) as error:
                return str(error) or f"{host.name}: does not answer"
            return None if done.code == 0 else f"{host.name}: {done.said}"

        return [problem for problem in await asyncio.gather(*(end(self.host(host)) for host in hosts)) if problem]

    def give_up(self, work: NodeWork) -> None:
        """Note that a host was lost with a job on it: the job is ended there as soon as the host is back."""
        self._given_up.setdefault(work.host.name, set()).add(self.layout.node_dir(work))
        pursuit = asyncio.create_task(self._pursue(self.host(work.host)))
        self._pursuits.add(pursuit)
        pursuit.add_done_callback(self._pursuits.discard)

    async def _pursue(self, host: SshHost) -> None:
        while True:
            await asyncio.sleep(LONGEST_PAUSE_S)
            async with self._clearing[host.name]:
                for node_dir in list(self._given_up.get(host.name, ())):
                    try:
                        await host.run(command(self.plan.cluster.python, "clear", str(node_dir), ""), timeout_s=None)
                    except HostError:
                        break
                    self._given_up[host.name].discard(node_dir)
                if not self._given_up.get(host.name):
                    self._given_up.pop(host.name, None)
                    return

    async def make_room(self, work: NodeWork) -> None:
        """End agents of this run that still live on a host, and put an earlier attempt's files aside.

        Raises:
            HostError: they do not end.
        """
        host, layout = self.host(work.host), self.layout
        argv = command(self.plan.cluster.python, "clear", str(layout.run), str(layout.node_dir(work)))
        async with self._clearing[host.name]:
            cleared = await host.run(argv, timeout_s=_TIDY_PATIENCE_S)
            if cleared.code != 0:
                raise HostError(host.name, f"there is no room for the job: {cleared.said}")
            self._given_up.pop(host.name, None)

    def keep_data(self, work: NodeWork, found: str) -> None:
        """Write down what data a job found on its hosts.

        Raises:
            HostError: it is not what another host of the job has.
        """
        path = work.node_dir.parent / DATA_FILE
        first, known = self._data.setdefault(path, (work.host.name, found))
        if known != found:
            raise HostError(work.host.name, f"its data is not the same as on {first}: {found} here, {known} there")
        if first == work.host.name:
            write_atomic(path, json.dumps(json.loads(found), indent=2))

    async def close(self) -> None:
        """Make a last attempt to end what lives on hosts that were lost, and let go of all connections."""
        for pursuit in self._pursuits:
            pursuit.cancel()
        await asyncio.gather(*self._pursuits, return_exceptions=True)
        lost = [self._hosts[name].host for name in self._given_up]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.tidy(lost), STOP_PATIENCE_S)
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
