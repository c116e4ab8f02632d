"""Carry out the plan of a run: take each of its jobs through its states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.read.reevaluation import was_cancelled
from accelmark.results.read.round_dir import earlier_attempts
from accelmark.results.schema import JobState, Summary
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.results.store.loaded_run import MANIFEST_FILE, RESULT_FILE
from accelmark.results.store.signature import require_key
from accelmark.run.agent.rank_exit import NodeState
from accelmark.run.controller.evaluate import FetchData, WeightsCheck
from accelmark.run.controller.node_jobs import node_jobs, write_job
from accelmark.run.controller.planned_kill import planned_kill
from accelmark.run.controller.spares import with_spares
from accelmark.run.controller.tuning import continued
from accelmark.run.controller.waiting import (
    Cancellation,
    end_agents,
    run_in_daemon_thread,
    start_agents,
    wait_for_agents,
)  # fmt: skip
from accelmark.run.display.displays import RunObserver, display
from accelmark.run.display.progress import ProgressReader
from accelmark.run.host import UnreachableError
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.library_log import library_log
from accelmark.run.record.measure import measure_run
from accelmark.run.record.registry import register_end, register_plan
from accelmark.run.record.source import require_unchanged
from accelmark.run.record.start import record_start
from accelmark.run.record.states import RunEventLog
from accelmark.run.sandboxes.image import require_images
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, SpecError
from accelmark.spec.job import TrainingWork, TrainJob
from accelmark.spec.log.records import COORDINATOR_LOG, DATA_FILE

_REDONE: Final[frozenset[JobState]] = frozenset({"lost", "cancelled"})
_REDONE_IF_ASKED: Final[frozenset[JobState]] = frozenset({"failed", "timed_out"})

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
        watching = asyncio.create_task(coordinator.stop.watch_files(directory.path))
        summary = await body(coordinator)
        watching.cancel()
        good = all(case.verdict != "INVALID" or "synthetic" in case.marks for case in summary.measured)
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
        self._launcher = self._create_launcher()
        self._event_log = self.directory.event_log()

    async def run(self) -> Summary:
        """Carry out every job that has not ended, and summarise.

        Raises AccelmarkError: hosts are not ready; nothing was started.
        """
        try:
            replaced = await self._check_or_replace_hosts()
            self._event_log.note("run_started")
            for what in replaced:
                self._event_log.note("note", what)
            record_start(self.directory.plan, self.directory.path)
            return await self._all(())
        finally:
            await self._close()

    async def resume(self, *, redo_failed: bool = False, from_scratch: bool = False) -> Summary:
        """Resume a run: attach to running jobs, redo lost and cancelled ones and cancelled evaluations, skip the rest.

        ``redo_failed``: redo jobs that failed or timed out, too. ``from_scratch``: do not resume from checkpoints.

        Raises:
            AccelmarkError: hosts are not ready for the jobs to redo; running jobs were followed to their end.
        """
        try:
            self._event_log.note("run_resumed", "to end it" if self.stop else None)
            if self.directory.plan.tuning is not None:
                register_plan(self.directory.path)  # its last change may not have been
            for job in self._in_state("preparing", "running"):
                await self._attach(job)
            again = self._in_state(*_REDONE, *(_REDONE_IF_ASKED if redo_failed else ()))
            unchecked = [job for job in self._in_state("succeeded") if was_cancelled(self.directory.round_dir(job))]
            if jobs := [*again, *unchecked, *self._in_state("queued")]:
                await self._check_hosts(jobs)
            if not self.stop:
                for job in again:
                    self._queue_again(job)
                for job in unchecked:
                    self.observer.note(f"{job.directory}: evaluating its weights, which was interrupted")
                    await self._check_weights(job)
                    await self._write_result(job)
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

    def _create_launcher(self) -> Launcher:
        launcher = create_launcher(self.directory.plan, self.directory.path)
        launcher.report = self.observer.note
        self.stop.before_exit = launcher.abort
        return launcher

    async def _check_or_replace_hosts(self) -> list[str]:
        """Check the hosts of all jobs, and replace those that are not ready by spares; returns what was replaced.

        Raises AccelmarkError: hosts are not ready, and there are not enough spares.
        """
        replaced: list[str] = []
        while True:
            try:
                await self._check_hosts(self.directory.plan.jobs)
            except SpecError as error:
                found = with_spares(self.directory.plan, error)
                if found is None:
                    raise
                await self._launcher.close()
                self.directory.replace_plan(found[0])
                self._launcher = self._create_launcher()
                replaced += found[1]
                for what in found[1]:
                    self.observer.note(what)
            else:
                return replaced

    async def _all(self, go_on: Sequence[str]) -> Summary:
        while (job := await self._next()) is not None:
            await self._take(job, go_on=job.directory in go_on)
            for _ in range(self.directory.plan.retry_lost):
                if self._state(job) == "lost" and not self.stop:
                    self._queue_again(job)
                    await self._take(job, go_on=True)
        self._event_log.note("run_finished")
        summary = await asyncio.to_thread(measure_run, self.directory.path)
        register_end(self.directory.path, summary)
        return summary

    async def _next(self) -> PlannedJob | None:
        """Return the next queued job; in a search for the best settings its trials are added to the plan first."""
        directory = self.directory
        if directory.plan.tuning is not None and not self.stop:
            plan = await asyncio.to_thread(continued, directory.plan, directory.path, self._event_log.jobs)
            if plan is not directory.plan:
                directory.replace_plan(plan)
                register_plan(directory.path)
                self._event_log.add(job.directory for job in plan.jobs)
                self.observer.planned(plan)
        return next(iter(self._in_state("queued")), None)

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
            state: NodeState = "lost" if isinstance(error, UnreachableError) else "failed"
            self._move(job, *await self._explained(state, str(error)))
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

    async def _start(self, job: PlannedJob, *, go_on: bool) -> Sequence[AgentHandle] | None:
        """Deliver files to the hosts and start the node agents (``run/agent/agent.py``); None on a stop request."""
        nodes = await write_job(self.directory, job, self._launcher, go_on=go_on)
        started = earlier_attempts(self.directory.round_dir(job))
        if go_on and started and isinstance(job.job.work, TrainingWork) and not nodes[0].job.resume:
            what = "no checkpoint to resume from (checkpoint.every_steps writes some): it starts again at step 1"
            self._event_log.note("note", what, job.directory)
            self.observer.note(f"{job.directory}: {what}")
        agents = self._launcher.agents(nodes)
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
        await start_agents(agents)
        return agents

    async def _attach(self, job: PlannedJob) -> None:
        """Follow a job that a dead coordinator started."""
        agents = self._launcher.agents(await node_jobs(self.directory, job, self._launcher))
        there = await asyncio.gather(*(agent.attach() for agent in agents))
        if not all(there):
            await end_agents([agent for agent, is_there in zip(agents, there, strict=True) if is_there])
            self._move(job, "lost", "the coordinator ended before all of its agents were started")
            return
        if self._state(job) == "preparing":
            self._move(job, "running", "followed by another coordinator")
        await self._follow(job, agents)

    async def _follow(self, job: PlannedJob, agents: Sequence[AgentHandle]) -> None:
        reader = ProgressReader(agents[0].node.node_dir, job.job.work)
        state, reason = await wait_for_agents(agents, self.stop, lambda: self.observer.progress(job, reader.read()))
        self._event_log.note("agents_ended", job=job.directory)
        if state == "succeeded":
            await self._check_weights(job)
        else:
            killed = planned_kill(job.job, self.directory.round_dir(job))
            state, reason = killed or await self._explained(state, reason)
        self._move(job, state, reason)
        await self._write_result(job)

    async def _write_result(self, job: PlannedJob) -> None:
        try:
            from accelmark.results.rounds.summary import write_round

            result = await asyncio.to_thread(write_round, self.directory.round_dir(job))
        except Exception as error:  # noqa: BLE001  later rounds run even though the records of this one cannot be read
            why = f"no result could be computed: {type(error).__name__}: {error}"
            self._event_log.note("note", why, job.directory)
            self.observer.note(f"{job.directory}: {why}")
            return
        self.observer.result(job, result)

    async def _explained(self, state: NodeState, reason: str | None) -> tuple[NodeState, str | None]:
        """Return the end of a job, or that of its hosts' allocation, which then caused it.

        Where the allocation was cancelled, no further job is started.
        """
        end = None if self.stop else await self._launcher.allocation_end()
        if end is None:
            return state, reason
        if end[0] == "cancelled":
            self.stop.request(end[1])
        return end

    async def _check_weights(self, job: PlannedJob) -> None:
        """Evaluate the weights of a round outside; a failure is a finding on the round, not a failure of it."""
        is_checked = isinstance(job.job.work, TrainJob) and job.job.work.is_checked
        check = WeightsCheck.of(self.directory, job) if is_checked else None
        if check is None:
            return
        doing = "evaluating weights, replaying steps"
        try:
            await check.run(
                self.directory, self._launcher, self.fetch, self.stop, lambda: self.observer.preparing(job, doing)
            )
        except AccelmarkError as error:
            self._event_log.note("note", f"its weights were not evaluated: {error}", job.directory)
            self.observer.note(f"{job.directory}: its weights were not evaluated: {error}")

    def _queue_again(self, job: PlannedJob) -> None:
        """Move an attempt's files to ``attempt<N>/``, and queue the job again."""
        attempt = self._event_log.jobs[job.directory].attempt
        round_dir = self.directory.round_dir(job)
        earlier = round_dir / f"attempt{attempt}"
        make_directory(earlier)
        for path in (*(self.directory.node_dir(job, node) for node in job.nodes), round_dir / RESULT_FILE):
            if path.exists():
                path.rename(earlier / path.name)
        self._move(job, "queued", f"attempt {attempt} ended: {self._state(job)}")

    def _in_state(self, *states: JobState) -> list[PlannedJob]:
        return [job for job in self.directory.plan.jobs if self._state(job) in states]

    def _state(self, job: PlannedJob) -> JobState:
        return self._event_log.jobs[job.directory].state

    def _move(self, job: PlannedJob, state: JobState, reason: str | None = None) -> None:
        self._event_log.move(job.directory, state, reason)
        self.observer.state(job, self._event_log.jobs[job.directory])
