"""Take each job of a plan through its states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

from accelmark.plan.plan import PlannedJob
from accelmark.results.schema import JobState, Summary
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.results.store.manifest import MANIFEST_FILE
from accelmark.run.controller.daemon_thread import run_in_daemon_thread
from accelmark.run.controller.job_waiter import Cancellation, JobWaiter
from accelmark.run.controller.node_jobs import JOB_FILE, job_on_hosts, node_jobs
from accelmark.run.display.observer import RunObserver
from accelmark.run.display.progress import ProgressReader
from accelmark.run.host import UnreachableError
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.measure import RESULT_FILE, measure_round, measure_run
from accelmark.run.record.source import source_record
from accelmark.run.record.states import RunEventLog
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec
from accelmark.spec.records import DATA_FILE, SOURCE_FILE, DataRecord

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Ensures that a job's data is in its ``data_dirs`` and reports progress; raises DataError.

Returns a record of each data set, or None where it did not check."""

PreflightCheck = Callable[[RunDirectory, Launcher, Sequence[PlannedJob], RunObserver], Awaitable[None]]
"""Checks that hosts are ready for jobs; raises AccelmarkError where they are not."""


async def no_preflight(
    _run: RunDirectory, _launcher: Launcher, _jobs: Sequence[PlannedJob], _observer: RunObserver
) -> None:
    """Skip preflight."""


_REDONE: Final[frozenset[JobState]] = frozenset({"lost", "cancelled"})
_REDONE_IF_ASKED: Final[frozenset[JobState]] = frozenset({"failed", "timed_out"})


@final
class Coordinator:
    """Carries out the plan of a run directory that the caller has locked.

    Args:
        directory: the run.
        launcher: how agents are started.
        observer: receives progress.
        fetch: obtains missing data.
        stop: requests to stop the run early.
        preflight: preflight, called before jobs are started.
    """

    def __init__(
        self,
        directory: RunDirectory,
        launcher: Launcher,
        observer: RunObserver,
        fetch: FetchData,
        stop: Cancellation,
        preflight: PreflightCheck = no_preflight,
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        self._observer = observer
        self._fetch = fetch
        self._stop = stop
        self._preflight_check = preflight
        self._event_log: RunEventLog = directory.event_log()

    async def run(self) -> Summary:
        """Carry out every job that has not ended, and summarise.

        Raises:
            AccelmarkError: hosts are not ready; nothing was started.
        """
        try:
            await self._preflight(self._directory.plan.jobs)
            self._event_log.note("run_started")
            write_atomic(self._directory.path / SOURCE_FILE, source_record().model_dump_json(indent=2))
            return await self._all(())
        finally:
            await self._close()

    async def resume(self, *, redo_failed: bool = False, from_scratch: bool = False) -> Summary:
        """Resume a run: attach to running jobs, redo lost and cancelled ones, skip the rest.

        Args:
            redo_failed: redo jobs that failed or timed out, too.
            from_scratch: do not resume from checkpoints.

        Raises:
            AccelmarkError: hosts are not ready for the jobs to redo; running jobs were followed to their end.
        """
        try:
            self._event_log.note("run_resumed")
            await self._attach_all()
            redone = _REDONE | _REDONE_IF_ASKED if redo_failed else _REDONE
            again = [job for job in self._directory.plan.jobs if self._state(job) in redone]
            queued = [job for job in self._directory.plan.jobs if self._state(job) == "queued"]
            if again or queued:
                await self._preflight([*again, *queued])
            if not self._stop:
                for job in again:
                    self._queue_again(job)
            return await self._all([job.directory for job in again if not from_scratch])
        except AccelmarkError:
            if (self._directory.path / MANIFEST_FILE).exists():  # the event log has changed since the summary
                measure_run(self._directory.path)
            raise
        finally:
            await self._close()

    async def _attach_all(self) -> None:
        for job in self._directory.plan.jobs:
            if self._state(job) in ("preparing", "running"):
                await self._attach(job)

    async def _preflight(self, jobs: Sequence[PlannedJob]) -> None:
        """End agents of earlier attempts on the hosts of ``jobs`` and check the hosts, until a stop is requested."""
        if self._stop:
            return

        async def check() -> None:
            used = {node.host for job in jobs for node in job.nodes}
            if any(status.attempt > 1 or status.ended for status in self._event_log.jobs.values()):
                specs = [host for host in self._directory.plan.cluster.hosts if host.name in used]
                await self._launcher.end_stale_agents(specs)
            await self._preflight_check(self._directory, self._launcher, jobs, self._observer)

        await self._unless_stopped(check())

    async def _unless_stopped(self, work: Awaitable[object]) -> bool:
        """Await ``work``, or cancel it on a stop request; returns whether it completed."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait_for_more_than(0))
        either: set[asyncio.Future[Any]] = {task, stop}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def end(self) -> Summary:
        """Stop jobs that a dead coordinator left running, and cancel all others that have not ended."""
        self._event_log.note("run_resumed", "to end it")
        self._stop.request("the run was stopped")
        return await self.resume()

    async def _all(self, go_on: Sequence[str]) -> Summary:
        for job in self._directory.plan.jobs:
            if self._state(job) == "queued":
                await self._carry_out(job, go_on=job.directory in go_on)
                await self._retry_lost(job)
        self._event_log.note("run_finished")
        return measure_run(self._directory.path)

    async def _close(self) -> None:
        self._event_log.close()
        await self._launcher.close()

    async def _retry_lost(self, job: PlannedJob) -> None:
        """Retry a lost job as often as the plan allows; files and events of each attempt are kept."""
        for _ in range(self._directory.plan.retry_lost):
            if self._state(job) != "lost" or self._stop:
                return
            self._queue_again(job)
            await self._carry_out(job, go_on=True)

    async def _carry_out(self, job: PlannedJob, *, go_on: bool) -> None:
        """Take one job from queued to its end."""
        reason = self._reason_not_to_start()
        if reason is not None:
            self._move(job, "cancelled", reason)
            return
        self._move(job, "preparing")
        try:
            agents = await self._prepare(job, go_on=go_on)
        except UnreachableError as error:
            self._move(job, "lost", str(error))
            return
        except AccelmarkError as error:
            self._move(job, "failed", str(error))
            return
        if agents is None:
            self._move(job, "cancelled", f"{self._stop.reason} before the ranks were started")
            return
        await self._follow(job, agents)

    def _reason_not_to_start(self) -> str | None:
        if self._stop:
            return f"not started: {self._stop.reason}"
        if not self._directory.plan.fail_fast:
            return None
        bad = [job for job, status in self._event_log.jobs.items() if status.state in ("failed", "timed_out", "lost")]
        return f"not started: {bad[0]} failed, and fail_fast is set" if bad else None

    async def _prepare(self, job: PlannedJob, *, go_on: bool) -> list[AgentHandle] | None:
        """Deliver data and files to the hosts and start the agents; None where a stop was requested meanwhile."""
        round_dir = self._directory.round_dir(job)
        make_directory(round_dir)
        spec = job_on_hosts(self._directory, job, go_on=go_on)
        write_atomic(round_dir / JOB_FILE, spec.model_dump_json(indent=2))
        agents = [self._launcher.agent(node) for node in node_jobs(self._directory, job, spec, self._launcher)]
        loop = asyncio.get_running_loop()

        def report(what: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._observer.preparing, job, what)

        def fetch() -> None:
            found = self._fetch(spec, report)
            if found is not None:
                records = {name: record.model_dump(mode="json") for name, record in found.items()}
                write_atomic(round_dir / DATA_FILE, json.dumps(records, indent=2))

        fetching = [run_in_daemon_thread(fetch)] if self._launcher.spec.shares_filesystem else []
        prepared = await self._unless_stopped(asyncio.gather(*fetching, *(agent.prepare() for agent in agents)))
        if not prepared or self._stop:
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
        spec = job_on_hosts(self._directory, job, go_on=False)
        agents = [self._launcher.agent(node) for node in node_jobs(self._directory, job, spec, self._launcher)]
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
        waiter = JobWaiter(agents, self._stop, lambda: self._observer.progress(job, reader.read()))
        state, reason = await waiter.wait()
        self._move(job, state, reason)
        try:
            result = await asyncio.to_thread(measure_round, self._directory.round_dir(job))
        except Exception as error:  # noqa: BLE001  the rounds to come are worth more than stopping at a bad record
            why = f"no result could be computed: {type(error).__name__}: {error}"
            self._event_log.note("note", why, job.directory)
            self._observer.note(f"{job.directory}: {why}")
            return
        self._observer.result(job, result)

    def _queue_again(self, job: PlannedJob) -> None:
        """Move an attempt's files to ``attempt<N>/``, and queue the job again."""
        attempt = self._event_log.jobs[job.directory].attempt
        round_dir = self._directory.round_dir(job)
        earlier = round_dir / f"attempt{attempt}"
        make_directory(earlier)
        for path in (*(self._directory.node_dir(job, node) for node in job.nodes), round_dir / RESULT_FILE):
            if path.exists():
                path.rename(earlier / path.name)
        self._move(job, "queued", f"attempt {attempt} was {self._state(job)}")

    def _state(self, job: PlannedJob) -> JobState:
        return self._event_log.jobs[job.directory].state

    def _move(self, job: PlannedJob, state: JobState, reason: str | None = None) -> None:
        self._event_log.move(job.directory, state, reason)
        self._observer.state(job, self._event_log.jobs[job.directory])
