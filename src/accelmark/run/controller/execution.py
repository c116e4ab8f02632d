"""Execute one job: write its files, prepare its hosts, start its agents, wait for their ends, and classify them.

Requests to stop it come by signals, and by files from another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from accelmark.plan.plan import PlannedJob
from accelmark.plan.request import requirements_file
from accelmark.results.read.round_dir import read_job
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.agent.rank_exit import NodeState, classify_job
from accelmark.run.agent.task import EXIT_FILE, STOP_FILES, AgentTask, Limits, NodeJob, TelemetryTask, VisibleDevices
from accelmark.run.host import ConnectionLostError, HostError, UnreachableError
from accelmark.run.launchers.launcher import AgentHandle, Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import EXIT_CANCELLED, RunError
from accelmark.spec.job import EvaluateJob, ExternalJob, JobSpec, NodeExit, RankStall, TrainingWork
from accelmark.spec.log.records import DATA_FILE, DataRecord
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.spec.plugins.framework import Server

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Ensures that a job's data is in its ``data_dirs`` and reports progress; raises DataError.

Returns a record of each data set, or None where it did not check."""
JobEnd = tuple[NodeState, str | None]
"""The state of a job and its first cause, which names host and rank where they are known."""
T = TypeVar("T")
JOB_FILE: Final = "job.json"
_FILES_S: Final = 1.0
_HOST_WAIT_S: Final = 3600.0
"""Longest time for which later jobs of a run wait for a run that has locked one of its hosts meanwhile."""
_RETRY_S: Final = 2.0
_SILENT: Final = 0.5
"""Share of the longest silence from which a rank counts as silent: others still wrote events."""
_COMMUNICATES: Final = re.compile(
    r"distributed/|distributed_c10d|collective|all_?reduce|all_?gather|reduce_?scatter|barrier|broadcast"
)
"""In the frames of a rank that waits for others."""


class Cancellation:
    """Counts requests to cancel a run: the first stops it cleanly, the second at once."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = "interrupted"
        self.before_exit: Callable[[], None] = lambda: None
        """Called where the process exits at once, at the third signal."""
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return self.count > 0

    def request(self, reason: str | None = None) -> None:
        """Request a clean stop, or with a second request an immediate one."""
        self.count += 1
        if reason is not None and self.count == 1:
            self.reason = reason
        self._changed.set()

    def handle_signals(self, note: Callable[[str], None], hang_up: Callable[[], str]) -> None:
        """On Ctrl-C and SIGTERM request a clean stop, then one at once, then exit.

        Where the terminal is closed, exit at once after ``hang_up``, which returns what to print; ranks continue.
        """

        def on_signal(name: str) -> None:
            self.request(f"interrupted by {name}")
            if self.count == 1:
                again = "Press Ctrl-C again to stop" if name == "Ctrl-C" else "'accelmark stop --now' stops"
                note(f"Stopping cleanly; results so far are kept. {again} at once.")
            elif self.count > 2:
                self.before_exit()
                os._exit(EXIT_CANCELLED)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, on_signal, "Ctrl-C")
        loop.add_signal_handler(signal.SIGTERM, on_signal, "a request to stop")

        def on_hang_up() -> None:
            with contextlib.suppress(OSError):  # standard error is often the terminal
                os.write(2, f"{hang_up()}\n".encode())
            os._exit(EXIT_CANCELLED)

        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, on_hang_up)

    async def watch_files(self, directory: Path) -> None:
        """Request what files in a run directory ask for, which ``stop`` on another machine creates; without end."""
        while True:
            for urgency, name in enumerate(STOP_FILES, start=1):
                if (directory / name).exists():
                    (directory / name).unlink(missing_ok=True)
                    while self.count < urgency:
                        self.request("was stopped from another machine")
            await asyncio.sleep(_FILES_S)

    async def wait_for_more_than(self, count: int) -> None:
        """Wait until there were more than ``count`` requests."""
        while self.count <= count:
            self._changed.clear()
            await self._changed.wait()

    async def unless_requested(self, work: Awaitable[object]) -> bool:
        """Await ``work``, or cancel it on a request; returns whether it completed."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self.wait_for_more_than(0))
        either: set[asyncio.Future[Any]] = {task, stop}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False


def run_until_signal(body: Coroutine[Any, Any, T]) -> T:
    """Run ``body``; SIGINT and SIGTERM cancel it, so that it returns what it holds of hosts.

    Raises KeyboardInterrupt: it was cancelled by one of them.
    """

    async def cancellable() -> T:
        task = asyncio.ensure_future(body)
        in_main = threading.current_thread() is threading.main_thread()
        # Also in a background process of a script, which starts with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a daemon thread and return its result; unlike with ``to_thread``, exit does not wait for it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return await asyncio.wrap_future(future)


async def execute_job(
    job: PlannedJob,
    launcher: Launcher,
    fetch: FetchData,
    stop: Cancellation,
    *,
    from_checkpoint: bool = False,
    report: Callable[[str], None] = lambda _: None,
    on_start: Callable[[], None] = lambda: None,
    tick: Callable[[], None] = lambda: None,
    interval_s: float = 0.2,
) -> JobEnd:
    """Take a job to its end.

    Args:
        fetch: fetches data, where hosts share this machine's file system; other hosts fetch theirs.
        report: receives steps of the preparation, from any thread.
        on_start: called before agents are started.
        tick: called about once in ``interval_s`` while agents run.

    Raises AccelmarkError: it could not be started; UnreachableError where agents may still run on a host.
    """
    file = launcher.run / job.directory / JOB_FILE
    if not (from_checkpoint and has_checkpoints(job, launcher)):
        file.unlink(missing_ok=True)
    nodes = await node_jobs(job, launcher, from_checkpoint=from_checkpoint)
    make_directory(file.parent)
    write_atomic(file, nodes[0].job.model_dump_json(indent=2))
    agents = launcher.agents(nodes)

    def fetch_data() -> None:
        if (records := fetch(nodes[0].job, report)) is not None:
            values = {name: record.model_dump(mode="json") for name, record in records.items()}
            write_atomic(file.with_name(DATA_FILE), json.dumps(values, indent=2))

    fetching = [run_in_daemon_thread(fetch_data)] if launcher.spec.shares_filesystem else []
    preparing = (prepare(agent, launcher.reconnect_s, report) for agent in agents)
    prepared = await stop.unless_requested(asyncio.gather(*fetching, *preparing))
    if not prepared or stop:
        reason = f"{stop.reason} before the ranks were started"
        for agent in agents:
            agent.record("cancelled", reason)
        return "cancelled", reason
    on_start()
    await _start(agents)
    return await _wait(agents, stop, tick, interval_s)


async def prepare(agent: AgentHandle, reconnect_s: float, report: Callable[[str], None]) -> None:
    """Prepare a host; where its connection is lost, try again for at most ``reconnect_s``.

    Raises AccelmarkError: it could not be prepared; UnreachableError only where the connection was lost.
    """
    give_up_at: float | None = None
    while True:
        try:
            return await agent.prepare()
        except UnreachableError as error:
            if isinstance(error, ConnectionLostError):
                give_up_at = time.monotonic() + reconnect_s
            if give_up_at is None:
                raise HostError(error.host, error.problem, error.advice) from error
            if time.monotonic() >= give_up_at:
                raise
            report(f"{error}: trying again")
            await asyncio.sleep(_RETRY_S)


async def follow_job(
    job: PlannedJob, launcher: Launcher, stop: Cancellation, on_start: Callable[[], None], tick: Callable[[], None]
) -> JobEnd | None:
    """Follow a job that an earlier coordinator started. If agents are missing, end the others and return None."""
    agents = launcher.agents(await node_jobs(job, launcher))
    present = await asyncio.gather(*(agent.attach() for agent in agents))
    if not all(present):
        await _end([agent for agent, is_present in zip(agents, present, strict=True) if is_present])
        return None
    on_start()
    return await _wait(agents, stop, tick, 1.0)


async def _start(agents: Sequence[AgentHandle]) -> None:
    started = await asyncio.gather(*(agent.start() for agent in agents), return_exceptions=True)
    failed = [error for error in started if isinstance(error, BaseException)]
    if not failed:
        return
    pairs = zip(agents, started, strict=True)
    ends = await _end([agent for agent, error in pairs if error is None or isinstance(error, UnreachableError)])
    if lost := [end for end in ends if end.state == "lost"]:
        raise UnreachableError(lost[0].host, f"{failed[0]}; {lost[0].reason}") from failed[0]
    raise failed[0]


async def _end(agents: Sequence[AgentHandle]) -> list[NodeExit]:
    await asyncio.gather(*(agent.stop(at_once=True) for agent in agents))
    return await asyncio.gather(*(agent.wait() for agent in agents))


async def _wait(
    agents: Sequence[AgentHandle], stop: Cancellation, tick: Callable[[], None], interval_s: float
) -> JobEnd:
    """Wait for a job on all of its hosts: the first failure ends the other nodes, and so does a stop request."""
    pending = {asyncio.create_task(agent.wait()): agent for agent in agents}
    ends: list[NodeExit] = []
    num_requests, is_ending = 0, False
    while pending:
        tick()
        requested = asyncio.create_task(stop.wait_for_more_than(num_requests))
        done, _ = await asyncio.wait({*pending, requested}, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
        requested.cancel()
        for task in pending.keys() & done:
            del pending[task]
            ends.append(task.result())
        failed = any(end.state != "succeeded" for end in ends)
        if stop.count > num_requests or (failed and not is_ending):
            num_requests, is_ending = stop.count, True
            await asyncio.gather(*(agent.stop(at_once=num_requests > 1) for agent in pending.values()))
    tick()
    state, reason = classify_job(ends)
    if state == "timed_out":
        reason = stall_cause(ends) or reason
    if state == "cancelled" and stop:
        return state, f"{stop.reason}, measurements are partial"
    return state, reason


async def node_jobs(job: PlannedJob, launcher: Launcher, *, from_checkpoint: bool = False) -> list[NodeJob]:
    """Return a job's part on each of its hosts, which ``python -m accelmark.run.agent.agent`` carries out there.

    ``from_checkpoint``: whether to resume from checkpoints of an interrupted attempt, if there are any.
    """
    directory, plan = RunDirectory(launcher.run, launcher.plan), launcher.plan
    has_begun = any(directory.path.glob(f"*/*/*_noderank*/{EXIT_FILE}"))
    spec = _job_on_hosts(job, launcher, from_checkpoint=from_checkpoint)
    hosts = {host.name: host for host in plan.cluster.hosts}
    mine = [hosts[node.host] for node in job.nodes]
    servers = [
        Server(address=await launcher.master_address(host), port=host.service_ports[0])
        for host in mine
        if host.service_ports
    ]
    vendor, folder = load_vendor(plan.vendor), find("vendors", plan.vendor)
    environment = dict(plan.cluster.environment)
    if servers:
        environment.setdefault("FLAGPERF_HOSTS", ",".join(server.address for server in servers))
        environment.setdefault("FLAGPERF_HOSTS_PORTS", ",".join(str(server.port) for server in servers))
    is_evaluation = isinstance(spec.work, EvaluateJob)
    if not is_evaluation or folder.origin == "accelmark":
        environment = {**vendor.environment, **environment}
    telemetry = TelemetryTask(vendor=plan.vendor, vendor_folder=folder.path, interval_s=plan.telemetry_interval_s)
    variable = plan.cluster.visible_devices_env or vendor.visible_devices_env
    adapted = spec.adaptation.path if spec.adaptation is not None else None
    master_address = await launcher.master_address(mine[0])
    limits = Limits(
        timeout_s=plan.timeout_s, stall_timeout_s=plan.stall_timeout_s, host_wait_s=_HOST_WAIT_S if has_begun else 0.0
    )

    nodes = []
    for host, node in zip(mine, job.nodes, strict=True):
        task = AgentTask(
            run=str(directory.path),
            host=host.name,
            noderank=node.noderank,
            nnodes=len(job.nodes),
            nproc=node.nproc,
            num_ranks=spec.ranks_per_host or node.nproc,
            command=node.command,
            job_file=directory.round_dir(job) / JOB_FILE,
            python=plan.cluster.environment_python(spec.framework),
            master_address=master_address,
            master_port=plan.cluster.master_port,
            environment=environment,
            visible_devices=VisibleDevices(variable=variable, count=node.nproc) if variable is not None else None,
            reported_variables=vendor.reported_variables,
            servers=tuple(servers),
            interface=host.interface,
            clear_caches=plan.cluster.clear_caches,
            requirements=requirements_file(adapted, spec.case.path),
            telemetry=None if is_evaluation else telemetry,
            limits=limits,
        )
        nodes.append(NodeJob(host=host, node_dir=directory.node_dir(job, node), job=spec, task=task))
    return nodes


def _job_on_hosts(job: PlannedJob, launcher: Launcher, *, from_checkpoint: bool) -> JobSpec:
    """Return the job with its paths, as its ranks read it, and with its seed.

    Where a vendor's code, which is hashed, takes part, the seed is drawn, and kept by later attempts: the code could
    have been prepared for the seed of the case. An open run may set one.
    """
    round_dir, spec = launcher.run / job.directory, job.job
    seed: int | None = None
    is_set = (entry := spec.provenance.get("seed")) is not None and entry.forced
    if isinstance(spec.work, TrainingWork) and spec.has_vendors_code and not is_set:
        try:
            seed = read_job(round_dir).seed
        except RunError:
            seed = secrets.randbits(31)
    changed: dict[str, object] = {
        "checkpoint_dir": round_dir / spec.checkpoint_dir,
        "resume": from_checkpoint and has_checkpoints(job, launcher),
        "seed": seed,
    }
    if launcher.plan.cluster.container is not None:  # mounted folders are in the container, installed packages are not
        for name, ref in (("case", spec.case), ("extern", spec.extern)):
            if ref is not None and ref.package is not None and not ref.package.startswith("accelmark."):
                changed[name] = ref.model_copy(update={"package": None})
    return spec.model_copy(update=changed)


def has_checkpoints(job: PlannedJob, launcher: Launcher) -> bool:
    """Return whether an earlier attempt at a job may have left checkpoints that it can resume from."""
    round_dir, work = launcher.run / job.directory, job.job.work
    if isinstance(work, ExternalJob) and not work.trainer.resume:
        return False
    if not launcher.spec.shares_filesystem:  # an attempt that was started may have written some on its hosts
        return any(round_dir.glob("attempt*/*_noderank*"))
    checkpoints = round_dir / job.job.checkpoint_dir
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def stall_cause(nodes: Sequence[NodeExit]) -> str | None:
    """Return which rank stopped first, with its host and the evidence, or that it is unknown; None without a stall.

    Evidence, the strongest first: a rank that is silent while others are not; a stopped process; a process in
    uninterruptible sleep; a rank behind all others in steps, or in collectives; a rank outside of communication while
    all others are inside.
    """
    ranks = [(node, rank) for node in nodes if node.stall is not None for rank in node.stall.ranks]
    ranks = [(node, rank) for node, rank in ranks if not rank.has_finished]
    if not ranks:
        return None
    longest = max(rank.silent_s for _, rank in ranks)
    silent = [(node, rank) for node, rank in ranks if rank.silent_s >= _SILENT * longest]
    if len(silent) == 1:
        node, rank = silent[0]
        what = node.reason or f"rank {rank.rank} wrote no event"
    elif (suspect := _suspect([rank for _, rank in silent])) is not None:
        rank, why = suspect
        node = next(node for node, silent_rank in silent if silent_rank is rank)
        what = f"rank {rank.rank} stopped first: {why}"
    else:
        unknown = "which rank stopped first is unknown: the stacks of all ranks are in exit.json of each host"
        return unknown + "".join(_messages(node) for node in nodes)
    where = f"{node.host}: " if len(nodes) > 1 else ""
    at = f"; it was at {rank.stack[0]}" if rank.stack else ""
    return where + what + at + _messages(node)


def _suspect(silent: Sequence[RankStall]) -> tuple[RankStall, str] | None:
    """Return the rank that the strongest evidence singles out, with that evidence; None where none does."""
    known = [rank for rank in silent if rank.process_state is not None]
    stopped = [rank for rank in known if rank.process_state in ("T", "t")]
    if len(stopped) == 1 or (stopped and len(stopped) < len(known)):
        return stopped[0], "its process is stopped (state T: by SIGSTOP or a debugger)"
    asleep = [rank for rank in known if rank.process_state == "D"]
    if len(asleep) == 1 < len(known):
        place = f" in {asleep[0].waits_in}" if asleep[0].waits_in else ""
        return asleep[0], f"its process is in uninterruptible sleep{place} (state D)"
    first, second, *_ = sorted(silent, key=lambda rank: rank.last_step or 0)
    if (first.last_step or 0) < (second.last_step or 0):
        return first, f"its last step was {first.last_step or 0}, that of the others {second.last_step} or later"
    last = [{collective.group: collective for collective in rank.collectives} for rank in silent]
    for group in last[0]:
        if all(group in collectives for collectives in last):
            (number, index), (next_number, _), *_ = sorted((of[group].number, index) for index, of in enumerate(last))
            if number < next_number:
                its = f"its last collective in group {group} was number {number} ({last[index][group].operation})"
                return silent[index], f"{its}, that of the others number {next_number} or later"
    outside = [
        rank for rank in silent if rank.stack and not any(_COMMUNICATES.search(frame) for frame in rank.stack[:3])
    ]
    if len(outside) == 1 and all(rank.stack for rank in silent):
        return outside[0], "it is the only one that does not wait in communication"
    return None


def _messages(node: NodeExit) -> str:
    if node.stall is None:
        return ""
    full = "".join(f"; {what} on {node.host}" for what in node.stall.full_file_systems)
    messages = node.stall.kernel_messages
    return full + (f"; the kernel of {node.host}: {messages[-1]}" if messages else "")
