"""Launching over SSH: nothing is shared, AccelMark is brought along, agents outlive the connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.plan.plan import Plan
from accelmark.results.files import write_atomic
from accelmark.run.delivery import PLUGINS, path_on_host, wheel
from accelmark.run.environment import rank_command
from accelmark.run.launchers.lastword import SILENT, failed_node, kept, last_word, lost_node, said
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.launchers.place import Place
from accelmark.run.launchers.sandbox_of import Enclosure, enclosure_for, model_files
from accelmark.run.onhost import command, start_command
from accelmark.run.sandboxes.image import have_image
from accelmark.run.sandboxes.sandbox import Inside
from accelmark.run.ssh.connection import HostError, SshHost, UnreachableError
from accelmark.run.ssh.deliver import deliver, put_files
from accelmark.run.ssh.layout import Layout
from accelmark.run.ssh.place import SshPlace
from accelmark.run.ssh.stream import AgentEnd, Stream, seen_here
from accelmark.run.states import utc_now
from accelmark.run.task import AGENT_LOG, IDENTITY_FILE, TASK_FILE
from accelmark.spec.catalog import PLUGINS_VARIABLE, find
from accelmark.spec.cluster import HostSpec
from accelmark.spec.evidence import DATA_FILE
from accelmark.spec.job import NodeExit

_IMAGE_TIMEOUT_S: Final = 3600.0
_DATA_TIMEOUT_S: Final = 4 * 3600.0
_STOP_PATIENCE_S: Final = 30.0
"""Longest time to look for a host that is out of reach once the run is to end."""
_TIDY_PATIENCE_S: Final = 90.0
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
        layout, code = self.layout, self.layout.code
        variables = {"PYTHONPATH": str(code), PLUGINS_VARIABLE: str(code / PLUGINS)}
        python = self.plan.cluster.python
        return [
            SshPlace(self.host(host), layout, python, variables, partial(self._bring, self.host(host)), self._enclosed)
            for host in hosts
        ]

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
            await asyncio.sleep(_LONGEST_PAUSE_S)
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
            await asyncio.wait_for(self.tidy(lost), _STOP_PATIENCE_S)
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
            await self._launcher.make_room(work)
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
        self._launcher.keep_data(self._work, done.out.decode(errors="replace").strip().splitlines()[-1])

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
                    self._launcher.give_up(self._work)
                    why = f"was out of reach for {now - gone_since:.0f} s: {error.what}"
                    return self._lost(f"{why}; what still runs there is ended when the host is back")
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
        word = last_word(node_dir) if end == "exit" else SILENT
        if isinstance(word, NodeExit):
            return word
        num_swept = await self._clean_up()
        last = said(node_dir / AGENT_LOG)
        if end == "dead" and not (node_dir / IDENTITY_FILE).exists():
            return self._keep(failed_node(self._work, f"the node agent could not begin{last}", self._started_at))
        if num_swept:
            word += f"; {num_swept} processes it left behind were ended"
        return self._lost(word + last)

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
        return kept(self._work.node_dir, end)
