"""Launching over SSH: nothing is shared, AccelMark is brought along, agents outlive the connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.files import write_atomic
from accelmark.run.delivery import path_on_host, wheel
from accelmark.run.environment import rank_command
from accelmark.run.launchers.lastword import failed_node, lost_node, said
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.sandbox_of import Enclosure, enclosure_for
from accelmark.run.onhost import command, start_command
from accelmark.run.sandboxes.image import have_image
from accelmark.run.sandboxes.sandbox import Inside
from accelmark.run.ssh.connection import HostError, SshHost, UnreachableError
from accelmark.run.ssh.deliver import deliver, put_files
from accelmark.run.ssh.layout import Layout
from accelmark.run.ssh.stream import AgentEnd, Stream, seen_here
from accelmark.run.states import utc_now
from accelmark.run.task import AGENT_LOG, EXIT_FILE, IDENTITY_FILE, TASK_FILE
from accelmark.spec.catalog import find
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit

_IMAGE_TIMEOUT_S: Final = 3600.0
_DATA_TIMEOUT_S: Final = 4 * 3600.0
_STOP_PATIENCE_S: Final = 30.0
"""Longest time to look for a host that is out of reach once the run is to end."""
_LONGEST_PAUSE_S: Final = 5.0


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
        self.out_of_reach: set[str] = set()
        """Hosts on which an agent of this run may still live."""

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
        """Return the commands that would be run: through ``ssh`` here, and by the agent there."""
        cluster, host = self.plan.cluster, work.host
        user = host.user or cluster.user
        place = f"{user}@{host.address}" if user else host.address
        remote = ["ssh", "-p", str(cluster.port_of(host)), place]
        enclosure = self.enclosure(work)
        commands = [recipe.make for recipe in [enclosure.recipe] if recipe is not None and recipe.make]
        commands.append(enclosure.sandbox.command(cluster.python, self.agent(work)))
        return [
            *([*remote, shlex.join(command)] for command in commands),
            rank_command(self.layout.task(work), cluster.python),
        ]

    def agent(self, work: NodeWork) -> Inside:
        """Return the agent of a job's part as a command for its sandbox."""
        layout = self.layout
        return Inside(
            module="accelmark.run.agent",
            arguments=(str(layout.node_dir(work)),),
            name=f"{layout.run_id}-{work.node_dir.parent.parent.name}-{work.node_dir.parent.name}-{work.task.noderank}",
            environment=layout.environment(work),
            writable=(Path(layout.work), Path(layout.run)),
            readable=tuple(work.job.data_dirs.values()),
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
        async with self._delivered.setdefault(host.name, asyncio.Lock()):
            if f"{host.name} code" not in self._have:
                await deliver(host, self.plan.cluster.python, wheel(), self.layout.code)
                self._have.add(f"{host.name} code")
            recipe = enclosure.recipe
            if recipe is None or f"{host.name} {recipe.name}" in self._have:
                return

            async def run(argv: Sequence[str]) -> tuple[int, str]:
                done = await host.run(argv, timeout_s=_IMAGE_TIMEOUT_S)
                return done.code, (done.out + done.err).decode(errors="replace")

            await have_image(recipe, host.name, run, work.node_dir)
            self._have.add(f"{host.name} {recipe.name}")

    async def close(self) -> None:
        """Make a last attempt to end what lives on hosts that were lost, and let go of all connections."""
        run, python = str(self.layout.run), self.plan.cluster.python

        async def end(host: SshHost) -> None:
            with contextlib.suppress(HostError, asyncio.TimeoutError):
                await asyncio.wait_for(host.run(command(python, "clear", run, "")), _STOP_PATIENCE_S)

        await asyncio.gather(*(end(self._hosts[name]) for name in self.out_of_reach))
        await asyncio.gather(*(host.close() for host in self._hosts.values()))


@final
class SshLink:
    """One job on one host."""

    def __init__(self, work: NodeWork, launcher: SshLauncher) -> None:
        self._work = work
        self._launcher = launcher
        self._host = launcher.host(work.host)
        self._python = launcher.plan.cluster.python
        self._remote = launcher.layout.node_dir(work)
        in_place = launcher.layout.home is not None
        self._stream = Stream(self._host, self._python, str(self._remote), work.node_dir, in_place=in_place)
        self._stop_by: float | None = None
        self._started_at = utc_now()

    @property
    def work(self) -> NodeWork:
        """What this link is for."""
        return self._work

    async def prepare(self) -> None:
        """Bring AccelMark, the image, the job and its data to the host.

        Raises:
            HostError: the host cannot take the job.
        """
        layout, work = self._launcher.layout, self._work
        try:
            cleared = await self._host.run(command(self._python, "clear", str(layout.run), str(self._remote)))
            if cleared.code != 0:
                raise HostError(self._host.name, f"there is no room for the job: {cleared.said}")
            await self._launcher.ready(work)
            files = {
                layout.job_file(work): layout.job(work).model_dump_json(indent=2),
                self._remote / TASK_FILE: layout.task(work).model_dump_json(indent=2),
            }
            await put_files(self._host, self._python, files)
            if layout.home is not None:
                written = hashlib.sha256(files[self._remote / TASK_FILE].encode()).hexdigest()
                await seen_here(self._host.name, work.node_dir / TASK_FILE, written)
            await self._bring_data()
        except UnreachableError as error:  # nothing was started: not lost
            raise HostError(error.host, error.what) from error

    async def _bring_data(self) -> None:
        dirs = list(self._work.job.data_dirs.values())
        if not dirs:
            return
        job_file = str(self._launcher.layout.job_file(self._work))
        offline = ("--offline",) if self._launcher.plan.offline else ()
        agent = self._launcher.agent(self._work)
        places = [path if path.is_dir() else path.parent for path in dirs]
        if self._launcher.plan.cluster.container is not None:
            await self._host.run(["mkdir", "-p", "--", *(str(path.parent) for path in dirs)])
            places = [path.parent for path in dirs]
        inside = Inside(
            module="accelmark.run.bring_data",
            arguments=(job_file, *offline),
            name=f"{agent.name}-data",
            environment=agent.environment,
            writable=(Path(self._launcher.layout.work), *places),
        )
        argv = self._launcher.enclosure(self._work).sandbox.command(self._python, inside)
        done = await self._host.run(argv, timeout_s=_DATA_TIMEOUT_S)
        if done.code != 0:
            raise HostError(self._host.name, f"its data is not there: {done.said}")

    async def start(self) -> None:
        """Start the agent so that it outlives the connection; doing so twice starts one.

        Raises:
            UnreachableError: it may have been started.
            HostError: it was not.
        """
        sandbox = self._launcher.enclosure(self._work).sandbox
        argv = sandbox.command(self._python, self._launcher.agent(self._work))
        done = await self._host.run(start_command(str(self._remote), argv))
        if done.code != 0:
            raise HostError(self._host.name, f"the node agent could not be started: {done.said}")

    async def attach(self) -> bool:
        """Tell whether an agent was ever started; a host that is out of reach now is asked again by :meth:`wait`."""
        try:
            done = await self._host.run(["test", "-d", str(self._remote / ".started")])
        except UnreachableError:
            return True
        return done.code == 0

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end; where its host is out of reach, it is asked as soon as that is back."""
        self._stop_by = time.monotonic() + _STOP_PATIENCE_S * (0.3 if at_once else 1)
        self._stream.ask(at_once=at_once)

    async def wait(self) -> NodeExit:
        """Bring files home until the agent has ended, through any loss of connection that is not too long."""
        gone_since: float | None = None
        pause_s = 0.2
        while True:
            begun = time.monotonic()
            try:
                end = await self._stream.to_the_end()
                return await self._last_word(end)
            except UnreachableError as error:
                now = time.monotonic()
                if gone_since is None or now - begun > 2 * self._patience_s:
                    gone_since, pause_s = now, 0.2
                patience_s = self._patience_s
                if now - gone_since > patience_s or (self._stop_by is not None and now > self._stop_by):
                    self._launcher.out_of_reach.add(self._host.name)
                    why = f"was out of reach for {now - gone_since:.0f} s: {error.what}"
                    return self._lost(f"{why}; what ran there may still run, and ends when the run is resumed")
            except HostError as error:
                return self._lost(error.what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _patience_s(self) -> float:
        return self._launcher.plan.cluster.reconnect_s

    async def _last_word(self, end: AgentEnd) -> NodeExit:
        node_dir = self._work.node_dir
        if end == "never":
            return self._lost("its node agent was never started")
        reason = "the node agent ended without a last word (was it killed?)"
        if end == "exit":
            try:
                return NodeExit.model_validate_json((node_dir / EXIT_FILE).read_bytes())
            except (OSError, ValueError) as error:
                reason = f"{EXIT_FILE} of the node agent cannot be read: {error}"
        num_swept = await self._clean_up()
        last = said(node_dir / AGENT_LOG)
        if end == "dead" and not (node_dir / IDENTITY_FILE).exists():
            return self._keep(failed_node(self._work, f"the node agent could not begin{last}", self._started_at))
        if num_swept:
            reason += f"; {num_swept} processes it left behind were ended"
        return self._lost(reason + last)

    async def _clean_up(self) -> int:
        """End what a dead agent left behind on its host; returns how many processes that were."""
        enclosure = self._launcher.enclosure(self._work)
        agent = self._launcher.agent(self._work)
        by_force = enclosure.sandbox.clean_up(agent.name)
        environment = {"PYTHONPATH": agent.environment["PYTHONPATH"]}
        sweeping = ["env", *(f"{name}={value}" for name, value in environment.items()), self._python]
        done = await self._host.run(by_force or [*sweeping, "-m", "accelmark.run.sweep", str(self._remote)])
        await self._stream.to_the_end()
        return int(done.out) if by_force is None and done.code == 0 and done.out.strip().isdigit() else 0

    def _lost(self, reason: str) -> NodeExit:
        return self._keep(lost_node(self._work, reason, self._started_at))

    def _keep(self, end: NodeExit) -> NodeExit:
        with contextlib.suppress(RunError):
            write_atomic(self._work.node_dir / EXIT_FILE, end.model_dump_json(indent=2))
        return end
