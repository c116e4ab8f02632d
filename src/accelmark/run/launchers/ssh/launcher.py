"""Launch node agents over SSH: AccelMark is delivered to hosts, and agents outlive connections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.datasets.ensure import CACHE_VARIABLE, cache_directory
from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.agent import agent_commands, temporary_directories
from accelmark.run.agent.task import AGENT_MODULE, TASK_FILE, AgentTask, NodeJob
from accelmark.run.host import HostError
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.ssh.agent import LONGEST_PAUSE_S, STOP_TIMEOUT_S, NodeStream, SshAgent, wait_until_visible
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.delivery import (
    PLUGINS,
    deliver,
    delivery_command,
    on_host,
    path_on_host,
    put_files,
    wheel,
)  # fmt: skip
from accelmark.run.launchers.ssh.options import Options
from accelmark.run.onhost import command, start_command
from accelmark.run.processes import NODE_MARKER, RUN_MARKER, ProcessId
from accelmark.run.sandboxes.sandbox import ModuleCommand, ensure_image, model_files
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.records import DATA_FILE
from accelmark.spec.number_format import duration
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from accelmark.spec.plugins.launcher import options_of

LOGINS_AT_ONCE: Final = 64
"""Logins take CPU time here (key exchange): with many more at once, each would exceed its time limit."""
_POLL_S: Final = 0.3
POLLS_PER_S: Final = 512
"""Interval at which each host sends new bytes of files, and the most that all hosts together send in a second."""
_DESCRIPTORS: Final = 256
"""Open files of the coordinator besides one connection for each host; twice as many connections are allowed."""
_CLEAR_TIMEOUT_S: Final = 90.0
_DATA_TIMEOUT_S: Final = 4 * 3600.0


@final
class Layout:
    """The directories of the run at ``run`` on its hosts, below the work directory."""

    def __init__(self, plan: Plan, run: Path, options: Options) -> None:
        self._options = options
        shared = options.shared_directory
        self.run_id = plan.run_id or run.name
        here = ProcessId.own()
        self.owner = f"{here.boot_id} {here.hostname}:{run.absolute()}"
        """Names this machine and the run's directory: a copy has another owner."""
        self.work = PurePosixPath(options.work_directory if shared is None else shared / "accelmark")
        self.is_shared_run = shared is not None and run.absolute().is_relative_to(shared)
        """Whether the hosts write to the run's directory directly, so that nothing is copied."""
        self.run = PurePosixPath(run.absolute()) if self.is_shared_run else self.work / "runs" / self.run_id

    @property
    def code(self) -> PurePosixPath:
        """The directory of the unpacked AccelMark."""
        return self.work / "code" / wheel().directory

    def node_dir(self, node: NodeJob) -> PurePosixPath:
        """Return a job's directory on its host: ``<case>/<round>/<node>`` below the run's."""
        return self.run.joinpath(*node.node_dir.parts[-3:])

    def job_file(self, node: NodeJob) -> PurePosixPath:
        """Return the path of the job with the hosts' paths; where the run is shared, it is next to ``job.json``."""
        return self.node_dir(node).parent / ("job.hosts.json" if self.is_shared_run else "job.json")

    def job(self, node: NodeJob) -> JobSpec:
        """Return the job with the paths of a host."""
        job = node.job
        # An evaluation job reads the checkpoints of its round, which is next to it.
        checkpoints = os.path.relpath(job.checkpoint_dir, node.node_dir.parent)
        return job.model_copy(
            update={
                "case": on_host(job.case, self.code),
                "extern": on_host(job.extern, self.code) if job.extern is not None else None,
                "checkpoint_dir": Path(self.node_dir(node).parent / checkpoints),
            }
        )

    def task(self, node: NodeJob) -> AgentTask:
        """Return the agent's task with the paths of a host."""
        task = node.task
        changed: dict[str, object] = {
            "run": self.run_id,
            "job_file": Path(self.job_file(node)),
            "limits": task.limits.model_copy(update={"abandon_s": self._options.abandon_s}),
            "locks_host": True,
        }
        for name, path in (("adaptation", task.adaptation), ("requirements", task.requirements), ("case", task.case)):
            changed[name] = path and path_on_host(path, self.code)
        if task.telemetry is not None:
            folder = path_on_host(task.telemetry.vendor_folder, self.code)
            changed["telemetry"] = task.telemetry.model_copy(update={"vendor_folder": folder})
        return task.model_copy(update=changed)


@final
class SshLauncher(Launcher):
    """Starts agents on the hosts of a cluster file."""

    locks_hosts = True

    def __init__(self, plan: Plan, run: Path) -> None:
        super().__init__(plan, run)
        self.options = options_of(Options, plan.cluster)
        self.reconnect_s = self.options.reconnect_s
        self.layout = Layout(plan, run, self.options)
        self.work_directory = str(self.layout.work)
        self.shared_directory = self.options.shared_directory
        hosts, dialling = plan.cluster.hosts, asyncio.Semaphore(LOGINS_AT_ONCE)
        self._connections = {host.name: SshConnection(host, self.options, dialling) for host in hosts}
        raise_descriptor_limit(len(hosts))
        self._locks = {name: asyncio.Lock() for name in self._connections}
        self._present: set[tuple[str, str]] = set()
        """Hosts, and the code or image that is known to be on them."""
        self._clearing = {name: asyncio.Lock() for name in self._connections}
        self._lost: set[tuple[str, PurePosixPath]] = set()
        """Lost hosts, and directories there of jobs whose agents may still run."""
        self._retries: set[asyncio.Task[None]] = set()
        self._data: dict[Path, tuple[str, str]] = {}
        """For each round, the first host that had its data, and its content."""

    @property
    def code(self) -> PurePosixPath:
        """The directory where AccelMark is unpacked."""
        return self.layout.code

    @property
    def variables(self) -> Mapping[str, str]:
        """Return where AccelMark and plug-ins are unpacked."""
        return {"PYTHONPATH": str(self.code), PLUGINS_VARIABLE: str(self.code / PLUGINS)}

    def host(self, spec: HostSpec) -> SshConnection:
        """Return the connection to a host."""
        return self._connections[spec.name]

    def path_on_host(self, path: Path) -> Path:
        """Return the path in the unpacked wheel."""
        return path_on_host(path, self.code)

    def agent(self, node: NodeJob) -> SshAgent:
        """Return the agent of a job on one host."""
        host, node_dir = self.host(node.host), self.layout.node_dir(node)
        stream = NodeStream(
            host,
            self.python,
            str(node_dir),
            self.layout.owner,
            node.node_dir,
            self.options.ping_s,
            max(_POLL_S, len(self._connections) / POLLS_PER_S),
            skip=temporary_directories(node.task),
            in_place=self.layout.is_shared_run,
        )
        return SshAgent(
            node,
            host,
            self._agent_command(node),
            self.clean_up_command(node, node_dir),
            command(self.python, "state", str(node_dir)),
            lambda: self._prepare(node),
            stream=stream,
            reconnect_s=self.options.reconnect_s,
            abandon=lambda: self._end_when_reachable(node),
            report=lambda what: self.report(what),
        )

    def agent_module(self, node: NodeJob) -> ModuleCommand:
        """Return the agent of a job as a module to run in its sandbox."""
        layout, node_dir = self.layout, str(self.layout.node_dir(node))
        markers = {RUN_MARKER: layout.run_id, NODE_MARKER: node_dir, CACHE_VARIABLE: str(cache_directory())}
        return ModuleCommand(
            module=AGENT_MODULE,
            arguments=(node_dir,),
            name=node.unique_name(layout.run_id),
            environment={**self.variables, **markers},
            writable=(Path(layout.work), Path(layout.run)),
            readable=(*node.job.data_dirs.values(), *model_files(node.job)),
        )

    def job_commands(self, node: NodeJob) -> list[list[str]]:
        """Return the commands over SSH, and those that the agent starts."""
        node_dir, data = self.layout.node_dir(node), self._data_command(node)
        commands = [
            delivery_command(self.python, self.code),
            *self.sandbox(node).image_commands(),
            self._clear_command(str(node_dir)),
            command(self.python, "files"),
            *([data] if data is not None else []),
            start_command(str(node_dir), self._agent_command(node)),
            command(self.python, "follow", str(node_dir), self.layout.owner),
        ]
        started = agent_commands(self.layout.task(node), Path(node_dir), self.rank_python)
        return [*map(self.host(node.host).command, commands), *started]

    def _agent_command(self, node: NodeJob) -> list[str]:
        return self.sandbox(node).command(self.python, self.agent_module(node))

    def _clear_command(self, node_dir: str) -> list[str]:
        """Return the command that ends agents of this run, renames an earlier attempt, and removes old runs."""
        keep_days = "" if self.layout.is_shared_run else f"{self.options.keep_days:g}"
        return command(self.python, "clear", str(self.layout.run), node_dir, keep_days, self.layout.owner)

    def _data_command(self, node: NodeJob) -> list[str] | None:
        """Return the command that fetches and verifies a job's data on a host; None where it needs none."""
        dirs = list(node.job.data_dirs.values())
        if not dirs:
            return None
        in_container = self.plan.cluster.container is not None
        places = [path.parent if in_container or not path.is_dir() else path for path in dirs]
        agent, offline = self.agent_module(node), ("--offline",) if self.plan.offline else ()
        inside = replace(
            agent,
            module="accelmark.run.controller.data",
            arguments=(str(self.layout.job_file(node)), *offline),
            name=f"{agent.name}-data",
            writable=(Path(self.layout.work), *places),
            readable=(),
        )
        return self.sandbox(node).command(self.python, inside)

    async def deliver(self, host: HostSpec) -> None:
        """Deliver AccelMark to a host, once."""
        async with self._locks[host.name]:
            if (host.name, "code") not in self._present:
                await deliver(self.host(host), self.python, self.code)
                self._present.add((host.name, "code"))

    async def _prepare(self, node: NodeJob) -> None:
        host, layout = self.host(node.host), self.layout
        await self._clear(node)
        await self.deliver(node.host)
        async with self._locks[host.name]:
            image = self.sandbox(node).image
            if image is not None and (host.name, image.name) not in self._present:
                await ensure_image(image, host, node.node_dir)
                self._present.add((host.name, image.name))
        task = layout.task(node).model_dump_json(indent=2)
        job = layout.job(node).model_dump_json(indent=2)
        await put_files(host, self.python, {layout.job_file(node): job, layout.node_dir(node) / TASK_FILE: task})
        if layout.is_shared_run:
            written = hashlib.sha256(task.encode()).hexdigest()
            await wait_until_visible(host.name, node.node_dir / TASK_FILE, written)
        await self._fetch_data(node)

    async def _clear(self, node: NodeJob) -> None:
        host = self.host(node.host)
        async with self._clearing[host.name]:
            cleared = await host.run(self._clear_command(str(self.layout.node_dir(node))), timeout_s=_CLEAR_TIMEOUT_S)
            if cleared.code != 0:
                raise HostError(host.name, f"an earlier attempt cannot be removed: {cleared.message}")
            self._lost = {lost for lost in self._lost if lost[0] != host.name}

    async def _fetch_data(self, node: NodeJob) -> None:
        argv, host = self._data_command(node), self.host(node.host)
        if argv is None:
            return
        if self.plan.cluster.container is not None:
            await host.run(["mkdir", "-p", "--", *(str(path.parent) for path in node.job.data_dirs.values())])
        done = await host.run(argv, timeout_s=_DATA_TIMEOUT_S)
        if done.code != 0:
            raise HostError(host.name, f"its data is not available: {done.message}")
        records = json.loads(done.out.decode(errors="replace").strip().splitlines()[-1])
        path = node.node_dir.parent / DATA_FILE
        content = json.dumps({name: {**record, "sample": {}} for name, record in records.items()})  # each draws its own
        first, known = self._data.setdefault(path, (host.name, content))
        if known != content:
            raise HostError(host.name, f"its data differs from the data of {first}: {content} here, {known} there")
        if first == host.name:
            write_atomic(path, json.dumps(records, indent=2))

    async def end_stale_agents(self, specs: Sequence[HostSpec]) -> list[str]:
        """End agents of this run on hosts; unreachable ones end by themselves without heartbeats."""
        left = duration(self.options.abandon_s)

        async def end(spec: HostSpec) -> str:
            try:
                running = self.host(spec).run(self._clear_command(""), timeout_s=None)
                done = await asyncio.wait_for(running, _CLEAR_TIMEOUT_S)
                problem = "" if done.code == 0 else f"{spec.name}: {done.message}"
            except (HostError, TimeoutError) as error:
                problem = str(error) or f"{spec.name}: no answer"
            return problem and f"{problem}; agents there end by themselves after {left} without a coordinator"

        return [problem for problem in await asyncio.gather(*map(end, specs)) if problem]

    def _end_when_reachable(self, node: NodeJob) -> None:
        """End the agent of a job on a lost host as soon as the host can be reached again."""
        host, lost = self.host(node.host), (node.host.name, self.layout.node_dir(node))
        argv = command(self.python, "clear", str(lost[1]), "", "", self.layout.owner)

        async def end() -> None:
            while lost in self._lost:
                await asyncio.sleep(LONGEST_PAUSE_S)
                async with self._clearing[host.name]:
                    if lost in self._lost:
                        with contextlib.suppress(HostError):
                            await host.run(argv, timeout_s=None)
                            self._lost.discard(lost)

        self._lost.add(lost)
        self._retries.add(asyncio.create_task(end()))

    async def close(self) -> None:
        """Try once more to end agents on lost hosts, and close all connections."""
        for retry in self._retries:
            retry.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        lost = [self._connections[name].spec for name in {name for name, _ in self._lost}]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.end_stale_agents(lost), STOP_TIMEOUT_S)
        await asyncio.gather(*(host.close() for host in self._connections.values()))


def raise_descriptor_limit(num_hosts: int) -> None:
    """Raise this process's limit of open files, so that it can be connected to all hosts.

    Raises RequestError: the hard limit is lower.
    """
    needed = _DESCRIPTORS + 2 * num_hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        problem = f"{num_hosts} hosts need {needed} open files, this machine allows {hard}"
        raise RequestError(f"{problem}: raise the hard limit (ulimit -Hn {needed}, or nofile in limits.conf)")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


create = SshLauncher
