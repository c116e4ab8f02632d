"""The coordinator: takes each job of a plan through its states, and never guesses how one ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

from accelmark.plan.plan import PlannedJob
from accelmark.results.schema import JobState, Summary
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.results.store.manifest import MANIFEST_FILE
from accelmark.run.controller.assign import JOB_FILE, job_on_hosts, node_works
from accelmark.run.controller.daemon_thread import in_background
from accelmark.run.controller.follow import Following, StopRequest
from accelmark.run.display.observer import Watcher
from accelmark.run.display.progress import ProgressReader
from accelmark.run.launchers.launcher import Launcher, Link
from accelmark.run.launchers.ssh.connection import UnreachableError
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.measure import RESULT_FILE, measure_round, measure_run
from accelmark.run.record.source import source_record
from accelmark.run.record.states import Ledger
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.evidence import DATA_FILE, SOURCE_FILE, DataRecord
from accelmark.spec.job import JobSpec

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Sees to it that a job's data is where its ``data_dirs`` say, telling how far it is; raises DataError.

Returns what it found there, or None where it did not look."""

Ready = Callable[[RunDirectory, Launcher, Sequence[PlannedJob], Watcher], Awaitable[None]]
"""Sees that hosts are ready for jobs that are about to be started on them; raises AccelmarkError where not."""


async def unseen(_directory: RunDirectory, _launcher: Launcher, _jobs: Sequence[PlannedJob], _watcher: Watcher) -> None:
    """Look at no host: what is wrong with it shows when a job is prepared there."""


REDONE: Final[frozenset[JobState]] = frozenset({"lost", "cancelled"})
_REDONE_IF_ASKED: Final[frozenset[JobState]] = frozenset({"failed", "timed_out"})


@final
class Coordinator:
    """Carries out the plan of a run directory that the caller holds.

    Args:
        directory: the run.
        launcher: how agents are started.
        watcher: who is told.
        fetch: brings data that is missing.
        stop: asked when the run is to end early.
        ready: sees that hosts are ready before jobs are started on them.
    """

    def __init__(
        self,
        directory: RunDirectory,
        launcher: Launcher,
        watcher: Watcher,
        fetch: FetchData,
        stop: StopRequest,
        ready: Ready = unseen,
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        self._watcher = watcher
        self._fetch = fetch
        self._stop = stop
        self._ready = ready
        self._ledger: Ledger = directory.ledger()

    async def run(self) -> Summary:
        """Carry out every job that has not ended, and sum up.

        Raises:
            AccelmarkError: hosts are not ready; nothing was started.
        """
        try:
            await self._see_hosts(self._directory.plan.jobs)
            self._ledger.note("run_started")
            write_atomic(self._directory.path / SOURCE_FILE, source_record().model_dump_json(indent=2))
            return await self._all(())
        finally:
            await self._let_go()

    async def resume(self, *, redo_failed: bool = False, from_scratch: bool = False) -> Summary:
        """Go on with a run: attach to what still runs, redo what was lost or cancelled, skip what is done.

        Args:
            redo_failed: redo what failed or timed out as well.
            from_scratch: do not go on from checkpoints.

        Raises:
            AccelmarkError: hosts are not ready for what is to be redone; what still ran was followed to its end.
        """
        try:
            self._ledger.note("run_resumed")
            await self._attach_all()
            redone = REDONE | _REDONE_IF_ASKED if redo_failed else REDONE
            again = [job for job in self._directory.plan.jobs if self._ledger.jobs[job.directory].state in redone]
            queued = [job for job in self._directory.plan.jobs if self._ledger.jobs[job.directory].state == "queued"]
            if again or queued:
                await self._see_hosts([*again, *queued])
            if not self._stop:
                for job in again:
                    self._queue_again(job)
            return await self._all([job.directory for job in again if not from_scratch])
        except AccelmarkError:
            if (self._directory.path / MANIFEST_FILE).exists():  # the event log is not as it was summed up
                measure_run(self._directory.path)
            raise
        finally:
            await self._let_go()

    async def _attach_all(self) -> None:
        for job in self._directory.plan.jobs:
            if self._ledger.jobs[job.directory].state in ("preparing", "running"):
                await self._attach(job)

    async def _see_hosts(self, jobs: Sequence[PlannedJob]) -> None:
        """End what an earlier attempt left on the hosts of ``jobs``, and see that they are ready; a stop ends it."""
        if self._stop:
            return

        async def look() -> None:
            used = {node.host for job in jobs for node in job.nodes}
            if any(status.attempt > 1 or status.ended for status in self._ledger.jobs.values()):
                await self._launcher.tidy([host for host in self._directory.plan.cluster.hosts if host.name in used])
            await self._ready(self._directory, self._launcher, jobs, self._watcher)

        looking, asked = asyncio.create_task(look()), asyncio.create_task(self._stop.more_than(0))
        either: set[asyncio.Task[Any]] = {looking, asked}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if looking.done():
            looking.result()
            return
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    async def end(self) -> Summary:
        """End what an earlier, dead coordinator left running, and call the rest cancelled."""
        self._ledger.note("run_resumed", "to end it")
        self._stop.ask("the run was stopped")
        return await self.resume()

    async def _all(self, go_on: Sequence[str]) -> Summary:
        for job in self._directory.plan.jobs:
            if self._ledger.jobs[job.directory].state == "queued":
                await self._one(job, go_on=job.directory in go_on)
                await self._retry_lost(job)
        self._ledger.note("run_finished")
        return measure_run(self._directory.path)

    async def _let_go(self) -> None:
        self._ledger.close()
        await self._launcher.close()

    async def _retry_lost(self, job: PlannedJob) -> None:
        """Do a lost job again as often as the plan allows; each attempt is in the event log, and its files are kept."""
        for _ in range(self._directory.plan.retry_lost):
            if self._ledger.jobs[job.directory].state != "lost" or self._stop:
                return
            self._queue_again(job)
            await self._one(job, go_on=True)

    async def _one(self, job: PlannedJob, *, go_on: bool) -> None:
        """Take one job from queued to its end."""
        reason = self._reason_not_to_start()
        if reason is not None:
            self._move(job, "cancelled", reason)
            return
        self._move(job, "preparing")
        try:
            links = await self._prepare(job, go_on=go_on)
        except UnreachableError as error:
            self._move(job, "lost", str(error))
            return
        except AccelmarkError as error:
            self._move(job, "failed", str(error))
            return
        if links is None:
            self._move(job, "cancelled", f"{self._stop.reason} before the ranks were started")
            return
        await self._follow(job, links)

    def _reason_not_to_start(self) -> str | None:
        if self._stop:
            return f"not started: {self._stop.reason}"
        if not self._directory.plan.fail_fast:
            return None
        bad = [job for job, status in self._ledger.jobs.items() if status.state in ("failed", "timed_out", "lost")]
        return f"not started: {bad[0]} failed, and fail_fast is set" if bad else None

    async def _prepare(self, job: PlannedJob, *, go_on: bool) -> list[Link] | None:
        """Bring data and files to the hosts and start the agents; None where it was asked to stop meanwhile."""
        round_dir = self._directory.round_dir(job)
        make_directory(round_dir)
        spec = job_on_hosts(self._directory, job, go_on=go_on)
        write_atomic(round_dir / JOB_FILE, spec.model_dump_json(indent=2))
        links = [self._launcher.link(work) for work in node_works(self._directory, job, spec, self._launcher)]
        loop = asyncio.get_running_loop()

        def tell(what: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._watcher.preparing, job, what)

        def fetch() -> None:
            found = self._fetch(spec, tell)
            if found is not None:
                records = {name: record.model_dump(mode="json") for name, record in found.items()}
                write_atomic(round_dir / DATA_FILE, json.dumps(records, indent=2))

        fetching = [in_background(fetch)] if self._launcher.fetches_here else []
        ready = asyncio.gather(*fetching, *(link.prepare() for link in links))
        asked = asyncio.create_task(self._stop.more_than(0))
        either: set[asyncio.Future[Any]] = {ready, asked}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not ready.done():
            ready.cancel()
            return None
        ready.result()
        if self._stop:
            return None
        self._move(job, "running")
        started = await asyncio.gather(*(link.start() for link in links), return_exceptions=True)
        failed = next((error for error in started if isinstance(error, BaseException)), None)
        if failed is not None:
            await asyncio.gather(*(link.stop(at_once=True) for link in links), return_exceptions=True)
            raise failed
        return links

    async def _attach(self, job: PlannedJob) -> None:
        """Take up a job that a dead coordinator had begun, to its end."""
        spec = job_on_hosts(self._directory, job, go_on=False)
        links = [self._launcher.link(work) for work in node_works(self._directory, job, spec, self._launcher)]
        there = await asyncio.gather(*(link.attach() for link in links))
        if not all(there):
            for link, is_there in zip(links, there, strict=True):
                if is_there:
                    await link.stop(at_once=True)
                    await link.wait()
            self._move(job, "lost", "the coordinator ended before all of its agents were started")
            return
        if self._ledger.jobs[job.directory].state == "preparing":
            self._move(job, "running", "taken up by another coordinator")
        await self._follow(job, links)

    async def _follow(self, job: PlannedJob, links: Sequence[Link]) -> None:
        reader = ProgressReader(links[0].work.node_dir, job.job.work)
        following = Following(links, self._stop, lambda: self._watcher.progress(job, reader.read()))
        state, reason = await following.to_the_end()
        self._move(job, state, reason)
        try:
            result = await asyncio.to_thread(measure_round, self._directory.round_dir(job))
        except Exception as error:  # noqa: BLE001  the rounds to come are worth more than stopping at a bad record
            why = f"no result could be computed: {type(error).__name__}: {error}"
            self._ledger.note("note", why, job.directory)
            self._watcher.note(f"{job.directory}: {why}")
            return
        self._watcher.result(job, result)

    def _queue_again(self, job: PlannedJob) -> None:
        """Put what an earlier attempt wrote aside, and queue the job again."""
        attempt = self._ledger.jobs[job.directory].attempt
        round_dir = self._directory.round_dir(job)
        aside = round_dir / f"attempt{attempt}"
        make_directory(aside)
        for path in (*(self._directory.node_dir(job, node) for node in job.nodes), round_dir / RESULT_FILE):
            if path.exists():
                path.rename(aside / path.name)
        self._move(job, "queued", f"attempt {attempt} was {self._ledger.jobs[job.directory].state}")

    def _move(self, job: PlannedJob, state: JobState, reason: str | None = None) -> None:
        self._ledger.move(job.directory, state, reason)
        self._watcher.state(job, self._ledger.jobs[job.directory])
