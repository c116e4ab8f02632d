"""Carry out the plan of a run: take each of its jobs through its states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.plan.adaptation import requirements_file
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.schema import JobState, Summary
from accelmark.results.store.bundle import MANIFEST_FILE
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.results.store.loaded_run import RESULT_FILE
from accelmark.results.store.signature import require_key
from accelmark.run.agent.task import AgentTask, Limits, NodeJob, TelemetryTask, VisibleDevices
from accelmark.run.controller.waiting import Cancellation, run_in_daemon_thread, wait_for_agents
from accelmark.run.display.displays import RunObserver, display
from accelmark.run.display.progress import ProgressReader
from accelmark.run.host import UnreachableError
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.library_log import library_log
from accelmark.run.record.measure import measure_run
from accelmark.run.record.registry import register_end
from accelmark.run.record.source import require_unchanged
from accelmark.run.record.start import record_start
from accelmark.run.record.states import RunEventLog
from accelmark.run.sandboxes.image import require_images
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.catalog import find, load_vendor
from accelmark.spec.plugins.framework import Server
from accelmark.spec.records import COORDINATOR_LOG, DATA_FILE, DataRecord

JOB_FILE: Final = "job.json"
_REDONE: Final[frozenset[JobState]] = frozenset({"lost", "cancelled"})
_REDONE_IF_ASKED: Final[frozenset[JobState]] = frozenset({"failed", "timed_out"})

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Ensures that a job's data is in its ``data_dirs`` and reports progress; raises DataError.

Returns a record of each data set, or None where it did not check."""

PreflightCheck = Callable[[RunDirectory, Launcher, Sequence[PlannedJob], RunObserver], Awaitable[None]]
"""Checks that hosts are ready for jobs; raises AccelmarkError where they are not."""


@final
@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The summary of a run, and the exit code of the command line."""

    directory: Path
    summary: Summary
    exit_code: int


def start(plan: Plan, path: Path, fetch: FetchData, preflight: PreflightCheck, *, as_json: bool) -> RunOutcome:
    """Carry out ``plan`` in a new directory at ``path``, after checking its hosts.

    Raises:
        HostsNotReadyError: hosts are not ready; nothing was started, and no directory is left.
        AccelmarkError: it could not start, and no directory is left; later failures are in the outcome.
    """
    require_images(plan)
    require_key()
    directory = RunDirectory.create(path, plan)
    try:
        return _carry_out(directory, fetch, preflight, Coordinator.run, as_json=as_json)
    except BaseException:
        if not directory.events():
            directory.discard()
        raise


def resume(
    path: Path, fetch: FetchData, preflight: PreflightCheck, *, redo_failed: bool, from_scratch: bool, as_json: bool
) -> RunOutcome:
    """Resume the run at ``path``, after checking the hosts of jobs that are started again.

    Raises:
        AccelmarkError: there is no run, another coordinator has locked it, a case has changed, or hosts are not ready.
    """
    directory = RunDirectory.open(path)
    require_unchanged(directory.plan, str(path))

    def body(coordinator: Coordinator) -> Coroutine[Any, Any, Summary]:
        return coordinator.resume(redo_failed=redo_failed, from_scratch=from_scratch)

    return _carry_out(directory, fetch, preflight, body, as_json=as_json)


def _carry_out(
    directory: RunDirectory,
    fetch: FetchData,
    preflight: PreflightCheck,
    body: Callable[[Coordinator], Coroutine[Any, Any, Summary]],
    *,
    as_json: bool,
) -> RunOutcome:
    async def run(observer: RunObserver) -> RunOutcome:
        coordinator = Coordinator(directory, fetch, preflight, observer)
        coordinator.stop.handle_signals(observer.note)
        summary = await body(coordinator)
        good = all(case.verdict != "INVALID" or "synthetic" in case.marks for case in summary.cases)
        code = EXIT_OK if summary.state == "succeeded" and good else EXIT_FAILED
        return RunOutcome(directory.path, summary, EXIT_CANCELLED if coordinator.stop else code)

    with (
        directory.locked(),
        library_log(directory.path / COORDINATOR_LOG, directory.plan.log_level),
        display(directory.plan, str(directory.path), directory.statuses(), as_json=as_json) as observer,
    ):
        return asyncio.run(run(observer))


@final
@dataclass(slots=True)
class Coordinator:
    """Carries out the plan of a run directory that the caller has locked."""

    directory: RunDirectory
    fetch: FetchData
    preflight: PreflightCheck
    observer: RunObserver
    """Receives progress."""
    stop: Cancellation = field(default_factory=Cancellation)
    """Requests to stop the run early."""
    _launcher: Launcher = field(init=False)
    _event_log: RunEventLog = field(init=False)

    def __post_init__(self) -> None:
        self._launcher = create_launcher(self.directory.plan, self.directory.path)
        self._event_log = self.directory.event_log()

    async def run(self) -> Summary:
        """Carry out every job that has not ended, and summarise.

        Raises AccelmarkError: hosts are not ready; nothing was started.
        """
        try:
            await self._check_hosts(self.directory.plan.jobs)
            self._event_log.note("run_started")
            record_start(self.directory.plan, self.directory.path)
            return await self._all(())
        finally:
            await self._close()

    async def resume(self, *, redo_failed: bool = False, from_scratch: bool = False) -> Summary:
        """Resume a run: attach to running jobs, redo lost and cancelled ones, skip the rest.

        ``redo_failed``: redo jobs that failed or timed out, too. ``from_scratch``: do not resume from checkpoints.

        Raises:
            AccelmarkError: hosts are not ready for the jobs to redo; running jobs were followed to their end.
        """
        try:
            self._event_log.note("run_resumed", "to end it" if self.stop else None)
            for job in self._in_state("preparing", "running"):
                await self._attach(job)
            again = self._in_state(*_REDONE, *(_REDONE_IF_ASKED if redo_failed else ()))
            if jobs := [*again, *self._in_state("queued")]:
                await self._check_hosts(jobs)
            if not self.stop:
                for job in again:
                    self._queue_again(job)
            return await self._all([job.directory for job in again if not from_scratch])
        except AccelmarkError:
            if (self.directory.path / MANIFEST_FILE).exists():  # the event log has changed since the summary
                measure_run(self.directory.path)
            raise
        finally:
            await self._close()

    async def _check_hosts(self, jobs: Sequence[PlannedJob]) -> None:
        """End agents of earlier attempts on the hosts of ``jobs`` and check the hosts, until a stop is requested."""

        async def check() -> None:
            used = {node.host for job in jobs for node in job.nodes}
            if any(status.attempt > 1 or status.ended for status in self._event_log.jobs.values()):
                specs = [host for host in self.directory.plan.cluster.hosts if host.name in used]
                await self._launcher.end_stale_agents(specs)
            await self.preflight(self.directory, self._launcher, jobs, self.observer)

        if not self.stop:
            await self.stop.unless_requested(check())

    async def _all(self, go_on: Sequence[str]) -> Summary:
        for job in self._in_state("queued"):
            await self._take(job, go_on=job.directory in go_on)
            for _ in range(self.directory.plan.retry_lost):
                if self._state(job) == "lost" and not self.stop:
                    self._queue_again(job)
                    await self._take(job, go_on=True)
        self._event_log.note("run_finished")
        summary = measure_run(self.directory.path)
        register_end(self.directory.path, summary)
        return summary

    async def _close(self) -> None:
        self._event_log.close()
        await self._launcher.close()

    async def _take(self, job: PlannedJob, *, go_on: bool) -> None:
        """Take one job from queued to its end."""
        reason = self._reason_not_to_start()
        if reason is not None:
            self._move(job, "cancelled", reason)
            return
        self._move(job, "preparing")
        try:
            agents = await self._start(job, go_on=go_on)
        except AccelmarkError as error:
            self._move(job, "lost" if isinstance(error, UnreachableError) else "failed", str(error))
            return
        if agents is None:
            self._move(job, "cancelled", f"{self.stop.reason} before the ranks were started")
            return
        await self._follow(job, agents)

    def _reason_not_to_start(self) -> str | None:
        if self.stop:
            return f"not started: {self.stop.reason}"
        bad = self._in_state("failed", "timed_out", "lost") if self.directory.plan.fail_fast else []
        return f"not started: {bad[0].directory} failed, and fail_fast is set" if bad else None

    async def _start(self, job: PlannedJob, *, go_on: bool) -> list[AgentHandle] | None:
        """Deliver files to the hosts and start the node agents (``run/agent/agent.py``); None on a stop request."""
        nodes = write_job(self.directory, job, self._launcher, go_on=go_on)
        agents = [self._launcher.agent(node) for node in nodes]
        loop = asyncio.get_running_loop()

        def report(what: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.observer.preparing, job, what)

        def fetch() -> None:
            found = self.fetch(nodes[0].job, report)
            if found is not None:
                records = {name: record.model_dump(mode="json") for name, record in found.items()}
                write_atomic(self.directory.round_dir(job) / DATA_FILE, json.dumps(records, indent=2))

        fetching = [run_in_daemon_thread(fetch)] if self._launcher.spec.shares_filesystem else []
        prepared = await self.stop.unless_requested(asyncio.gather(*fetching, *(agent.prepare() for agent in agents)))
        if not prepared or self.stop:
            return None
        self._move(job, "running")
        started = await asyncio.gather(*(agent.start() for agent in agents), return_exceptions=True)
        failed = next((error for error in started if isinstance(error, BaseException)), None)
        if failed is not None:
            await asyncio.gather(*(agent.stop(at_once=True) for agent in agents), return_exceptions=True)
            raise failed
        return agents

    async def _attach(self, job: PlannedJob) -> None:
        """Follow a job that a dead coordinator started."""
        agents = [self._launcher.agent(node) for node in node_jobs(self.directory, job, self._launcher)]
        there = await asyncio.gather(*(agent.attach() for agent in agents))
        if not all(there):
            for agent, is_there in zip(agents, there, strict=True):
                if is_there:
                    await agent.stop(at_once=True)
                    await agent.wait()
            self._move(job, "lost", "the coordinator ended before all of its agents were started")
            return
        if self._state(job) == "preparing":
            self._move(job, "running", "followed by another coordinator")
        await self._follow(job, agents)

    async def _follow(self, job: PlannedJob, agents: Sequence[AgentHandle]) -> None:
        reader = ProgressReader(agents[0].node.node_dir, job.job.work)
        state, reason = await wait_for_agents(agents, self.stop, lambda: self.observer.progress(job, reader.read()))
        self._move(job, state, reason)
        try:
            from accelmark.results.rounds.summary import write_round

            result = await asyncio.to_thread(write_round, self.directory.round_dir(job))
        except Exception as error:  # noqa: BLE001  the rounds to come are worth more than stopping at a bad record
            why = f"no result could be computed: {type(error).__name__}: {error}"
            self._event_log.note("note", why, job.directory)
            self.observer.note(f"{job.directory}: {why}")
            return
        self.observer.result(job, result)

    def _queue_again(self, job: PlannedJob) -> None:
        """Move an attempt's files to ``attempt<N>/``, and queue the job again."""
        attempt = self._event_log.jobs[job.directory].attempt
        round_dir = self.directory.round_dir(job)
        earlier = round_dir / f"attempt{attempt}"
        make_directory(earlier)
        for path in (*(self.directory.node_dir(job, node) for node in job.nodes), round_dir / RESULT_FILE):
            if path.exists():
                path.rename(earlier / path.name)
        self._move(job, "queued", f"attempt {attempt} was {self._state(job)}")

    def _in_state(self, *states: JobState) -> list[PlannedJob]:
        return [job for job in self.directory.plan.jobs if self._state(job) in states]

    def _state(self, job: PlannedJob) -> JobState:
        return self._event_log.jobs[job.directory].state

    def _move(self, job: PlannedJob, state: JobState, reason: str | None = None) -> None:
        self._event_log.move(job.directory, state, reason)
        self.observer.state(job, self._event_log.jobs[job.directory])


def write_job(directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, go_on: bool = False) -> list[NodeJob]:
    """Write ``job.json`` of a job, and return its part on each of its hosts; see :func:`node_jobs`."""
    nodes = node_jobs(directory, job, launcher, go_on=go_on)
    make_directory(directory.round_dir(job))
    write_atomic(directory.round_dir(job) / JOB_FILE, nodes[0].job.model_dump_json(indent=2))
    return nodes


def node_jobs(directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, go_on: bool = False) -> list[NodeJob]:
    """Return a job's part on each of its hosts, which ``python -m accelmark.run.agent.agent`` carries out there.

    ``go_on``: whether to resume from checkpoints of an interrupted attempt, if there are any.
    """
    plan, spec = directory.plan, _job_on_hosts(directory, job, launcher, go_on=go_on)
    hosts = {host.name: host for host in plan.cluster.hosts}
    mine = [hosts[node.host] for node in job.nodes]
    servers = tuple(
        Server(address=launcher.master_address(host), port=host.service_ports[0]) for host in mine if host.service_ports
    )
    flagperf = {
        "FLAGPERF_HOSTS": ",".join(server.address for server in servers),
        "FLAGPERF_HOSTS_PORTS": ",".join(str(server.port) for server in servers),
    }
    vendor, vendor_folder = load_vendor(plan.vendor), find("vendors", plan.vendor).path
    variable = plan.cluster.visible_devices_env or vendor.visible_devices_env
    adaptation = f"{spec.key.model}-{spec.key.framework}" if spec.adaptation is not None else None
    adapted = vendor_folder / "cases" / adaptation if adaptation is not None else None
    return [
        NodeJob(
            host=host,
            node_dir=directory.node_dir(job, node),
            job=spec,
            task=AgentTask(
                run=str(directory.path),
                host=host.name,
                noderank=node.noderank,
                nnodes=len(job.nodes),
                nproc=node.nproc,
                ranks_per_host=spec.ranks_per_host,
                command=node.command,
                job_file=directory.round_dir(job) / JOB_FILE,
                framework=spec.framework,
                master_address=launcher.master_address(mine[0]),
                master_port=plan.cluster.master_port,
                environment={**vendor.environment, **(flagperf if servers else {}), **plan.cluster.environment},
                threads=spec.work.threads,
                visible_devices=VisibleDevices(variable=variable, count=node.nproc) if variable is not None else None,
                servers=servers,
                interface=host.interface,
                clear_caches=plan.cluster.clear_caches,
                adaptation=adapted,
                requirements=requirements_file(adapted, spec.case.path),
                case=spec.case.path,
                data_dirs=tuple(spec.data_dirs.values()),
                telemetry=TelemetryTask(
                    vendor=plan.vendor, vendor_folder=vendor_folder, interval_s=plan.telemetry_interval_s
                ),
                limits=Limits(timeout_s=plan.timeout_s, stall_timeout_s=plan.stall_timeout_s),
            ),
        )
        for host, node in zip(mine, job.nodes, strict=True)
    ]


def _job_on_hosts(directory: RunDirectory, job: PlannedJob, launcher: Launcher, *, go_on: bool) -> JobSpec:
    """Return the job with its paths, as its ranks read it."""
    checkpoints = directory.round_dir(job) / job.job.checkpoint_dir
    on_hosts = not launcher.spec.shares_filesystem  # cannot be checked from here
    has_any = on_hosts or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    changed: dict[str, object] = {"checkpoint_dir": checkpoints, "resume": go_on and has_any}
    if directory.plan.cluster.container is not None:  # mounted folders are in the container, installed packages are not
        for name, ref in (("case", job.job.case), ("extern", job.job.extern)):
            if ref is not None and ref.package is not None and not ref.package.startswith("accelmark."):
                changed[name] = ref.model_copy(update={"package": None})
    return job.job.model_copy(update=changed)
