"""Carry out the plan of a run: take each of its jobs through its states; stop a run, also without its coordinator.

A search for the best settings gets its next trial, or its last rounds, when the jobs before have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.audit.verdict import audit_case
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.plan.tuning import settings_of, with_trial, with_tuned_rounds
from accelmark.results.figures import FigureName
from accelmark.results.read.round_dir import earlier_attempts, was_cancelled
from accelmark.results.schema import JobState, RoundResult, Summary
from accelmark.results.store.bundle import require_key
from accelmark.results.store.files import make_directory
from accelmark.results.store.loaded_run import MANIFEST_FILE, RESULT_FILE, load_round
from accelmark.results.tuning import is_eligible
from accelmark.run.agent.task import STOP_FILES
from accelmark.run.controller.evaluate import evaluate, evaluation_of
from accelmark.run.controller.execution import Cancellation, FetchData, JobEnd, execute_job, follow_job, has_checkpoints
from accelmark.run.display.displays import ProgressReader, RunObserver, display
from accelmark.run.host import UnreachableError
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory, measure_run
from accelmark.run.record.registry import record_start, register_end, register_plan, require_original, require_unchanged
from accelmark.run.record.states import JobStatus
from accelmark.run.sandboxes.sandbox import recipe_of
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RunError, SpecError, WriteError
from accelmark.spec.job import TrainingWork, TrainJob
from accelmark.spec.log.records import COORDINATOR_LOG
from accelmark.spec.plugins.catalog import add_plugins
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.settings.tuning import TuningSpec, identity, next_trial

_STOP_TIMEOUT_S: Final = 90.0
PreflightCheck = Callable[[Launcher, Sequence[PlannedJob], RunObserver], Awaitable[None]]
"""Checks that hosts are ready for jobs; raises AccelmarkError where they are not."""


class RunOutcome(NamedTuple):
    """The summary of a run, and the exit code of the command line."""

    directory: Path
    summary: Summary
    exit_code: int


def start(plan: Plan, path: Path, fetch: FetchData, preflight: PreflightCheck, *, as_json: bool) -> RunOutcome:
    """Carry out ``plan`` in a new directory at ``path``, after checking its hosts.

    Raises AccelmarkError: it could not start, and no directory is left; later failures are in the outcome.
    """
    for job in plan.jobs:
        recipe_of(plan, job.job)  # a vendor without a recipe is an error
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

    Raises AccelmarkError: there is no run, it is in progress, a case has changed, or hosts are not ready.
    """
    directory = RunDirectory.open(path)
    for folder in directory.plan.plugins:
        add_plugins(folder)
    require_unchanged(directory.plan, str(path))
    require_original(directory.path)
    body = partial(Coordinator.resume, redo_failed=redo_failed, from_scratch=from_scratch)
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
        coordinator.stop.handle_signals(observer.note, coordinator.hang_up)
        watching = asyncio.create_task(coordinator.stop.watch_files(directory.path))
        try:
            summary = await body(coordinator)
        except WriteError as error:
            raise RunError(f"{error}{coordinator.what_continues()}") from error
        watching.cancel()
        good = all(case.verdict != "INVALID" or "synthetic" in case.marks for case in summary.measured)
        code = EXIT_OK if summary.state == "succeeded" and good else EXIT_FAILED
        return RunOutcome(directory.path, summary, EXIT_CANCELLED if coordinator.stop else code)

    with (
        directory.locked(),
        _library_log(directory.path / COORDINATOR_LOG, directory.plan.log_level),
        display(directory.plan, str(directory.path), directory.statuses(), as_json=as_json) as observer,
    ):
        return asyncio.run(run(observer))


@contextmanager
def _library_log(path: Path, level: str) -> Iterator[None]:
    """Append what libraries log at ``level`` or above to ``path``, until the context ends."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(filename)s,%(lineno)d] %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    # At the level info it writes lines for each command on each host.
    logging.getLogger("asyncssh").setLevel(logging.WARNING if level == "info" else logging.NOTSET)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


class Coordinator:
    """Carries out the plan of a run directory that the caller has locked."""

    def __init__(
        self, directory: RunDirectory, fetch: FetchData, preflight: PreflightCheck, observer: RunObserver
    ) -> None:
        self.directory, self.fetch, self.preflight, self.observer = directory, fetch, preflight, observer
        self.stop = Cancellation()
        """Requests to stop the run early."""
        self._launcher = self._create_launcher()
        self._event_log = directory.event_log()

    async def run(self) -> Summary:
        """Carry out every job that has not ended. Raises AccelmarkError: hosts are not ready; nothing was started."""
        try:
            replaced = await self._check_or_replace_hosts()
            self._event_log.note("run_started")
            for what in replaced:
                self._event_log.note("note", what)
            record_start(self.directory.plan, self.directory.path)
            return await self._run_all(())
        finally:
            await self._close()

    async def resume(self, *, redo_failed: bool = False, from_scratch: bool = False) -> Summary:
        """Resume a run: attach to running jobs, redo lost and cancelled ones and cancelled evaluations, skip the rest.

        ``redo_failed``: redo jobs that failed or timed out, too. ``from_scratch``: do not resume from checkpoints.

        Raises AccelmarkError: hosts are not ready for the jobs to redo; running jobs were followed to their end.
        """
        try:
            self._event_log.note("run_resumed", "to end it" if self.stop else None)
            for job in self._in_state("preparing", "running"):
                await self._attach(job)
            failed: tuple[JobState, ...] = ("failed", "timed_out") if redo_failed else ()
            again = self._in_state("lost", "cancelled", *failed)
            unchecked = [job for job in self._in_state("succeeded") if was_cancelled(self.directory.round_dir(job))]
            if jobs := [*again, *unchecked, *self._in_state("queued")]:
                await self._check_hosts(jobs)
            if not self.stop:
                for job in again:
                    self._queue_again(job)
                for job in unchecked:
                    self.observer.note(f"{job.directory}: evaluating its weights, which was interrupted")
                    await self._evaluate(job)
                    await self._write_result(job)
            return await self._run_all([job.directory for job in again if not from_scratch])
        except AccelmarkError:
            if (self.directory.path / MANIFEST_FILE).exists():  # the event log has changed since the summary
                measure_run(self.directory.path)
            raise
        finally:
            await self._close()

    def hang_up(self) -> str:
        """Leave ranks running as the terminal was closed, or remove a run that has started nothing; returns a message.

        This process has to exit after it.
        """
        path = self.directory.path
        if not self._event_log.num_events:
            self._launcher.abort()
            self.directory.discard()
            return f"{path}: the terminal was closed before anything was started"
        what = f"the terminal was closed{self.what_continues()}"
        self._event_log.note("note", what)
        return f"{path}: {what}"

    def what_continues(self) -> str:
        """Return how a run continues whose coordinator ends early; empty where nothing was started."""
        what = "ranks that were started continue; follow them" if self._in_state("running") else "continue"
        return f"; {what} with 'accelmark resume {self.directory.path}'" if self._event_log.num_events else ""

    def _create_launcher(self) -> Launcher:
        launcher = create_launcher(self.directory.plan, self.directory.path)
        launcher.report = self.observer.note
        self.stop.before_exit = launcher.abort
        return launcher

    async def _check_hosts(self, jobs: Sequence[PlannedJob]) -> None:
        """End agents of earlier attempts on the hosts of ``jobs`` and check the hosts, until a stop is requested."""

        async def check() -> None:
            used = {node.host for job in jobs for node in job.nodes}
            if any(status.attempt > 1 or status.ended for status in self._event_log.jobs.values()):
                specs = [host for host in self.directory.plan.cluster.hosts if host.name in used]
                await self._launcher.end_stale_agents(specs)
            await self.preflight(self._launcher, jobs, self.observer)

        if not self.stop:
            await self.stop.unless_requested(check())

    async def _check_or_replace_hosts(self) -> list[str]:
        """Check the hosts of all jobs, and replace those that are not ready by spares; returns what was replaced."""
        replaced: list[str] = []
        while True:
            try:
                await self._check_hosts(self.directory.plan.jobs)
                return replaced
            except SpecError as error:
                plan, notes = _with_spares(self.directory.plan, error)
                if not notes:
                    raise
                await self._launcher.close()
                self.directory.replace_plan(plan)
                self._launcher = self._create_launcher()
                replaced += notes
                for what in notes:
                    self.observer.note(what)

    async def _run_all(self, from_checkpoint: Sequence[str]) -> Summary:
        while True:
            if not self.stop and await asyncio.to_thread(add_next_jobs, self.directory, self._event_log.jobs):
                known = {job.directory: JobStatus() for job in self.directory.plan.jobs}
                self._event_log.jobs = known | self._event_log.jobs
                self.observer.planned(self.directory.plan)
            if not (queued := self._in_state("queued")):
                break
            job = queued[0]
            await self._run_job(job, from_checkpoint=job.directory in from_checkpoint)
            for _ in range(self.directory.plan.retry_lost):
                if self._state(job) == "lost" and not self.stop:
                    self._queue_again(job)
                    await self._run_job(job, from_checkpoint=True)
        self._event_log.note("run_finished")
        summary = await asyncio.to_thread(measure_run, self.directory.path)
        register_end(self.directory.path, summary)
        return summary

    async def _close(self) -> None:
        self._event_log.close()
        self._launcher.leaves_ranks = bool(self._in_state("running"))
        await self._launcher.close()

    async def _run_job(self, job: PlannedJob, *, from_checkpoint: bool) -> None:
        bad = self._in_state("failed", "timed_out", "lost") if self.directory.plan.fail_fast else []
        if self.stop or bad:
            why = self.stop.reason if self.stop else f"{bad[0].directory} failed, and fail_fast is set"
            self._move(job, "cancelled", f"not started: {why}")
            return
        self._move(job, "preparing")
        is_repeated = from_checkpoint and earlier_attempts(self.directory.round_dir(job))
        can_resume = not isinstance(job.job.work, TrainingWork) or has_checkpoints(job, self._launcher)
        if is_repeated and not can_resume:
            why = "no checkpoint to resume from (checkpoint.every_steps writes some)"
            self._note(job, f"{why}: it starts again at step 1")
        loop = asyncio.get_running_loop()

        def report(what: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.observer.preparing, job, what)

        try:
            end = await execute_job(
                job,
                self._launcher,
                self.fetch,
                self.stop,
                from_checkpoint=from_checkpoint,
                report=report,
                on_start=lambda: self._move(job, "running"),
                tick=self._reporter(job),
                interval_s=1.0,
            )
        except WriteError:  # this machine's disk: ranks continue
            raise
        except AccelmarkError as error:
            end = "lost" if isinstance(error, UnreachableError) else "failed", str(error)
        await self._finish(job, end)

    async def _attach(self, job: PlannedJob) -> None:
        def on_start() -> None:
            if self._state(job) == "preparing":
                self._move(job, "running", "followed by another coordinator")

        end = await follow_job(job, self._launcher, self.stop, on_start, self._reporter(job))
        await self._finish(job, end or ("lost", "the coordinator ended before all of its agents were started"))

    def _reporter(self, job: PlannedJob) -> Callable[[], None]:
        reader = ProgressReader(self.directory.node_dir(job, job.nodes[0]), job.job.work)
        return lambda: self.observer.progress(job, reader.read())

    async def _finish(self, job: PlannedJob, end: JobEnd) -> None:
        is_started = self._state(job) == "running"
        if is_started:
            self._event_log.note("agents_ended", job=job.directory)
        if end[0] == "succeeded":
            await self._evaluate(job)
        elif not self.stop and (allocation_end := await self._launcher.allocation_end()) is not None:
            end = allocation_end  # it ended the job
            if end[0] == "cancelled":  # nor can later jobs be started
                self.stop.request(end[1])
        self._move(job, *end)
        if is_started:
            await self._write_result(job)

    async def _write_result(self, job: PlannedJob) -> None:
        try:
            from accelmark.results.rounds.summary import write_round

            result = await asyncio.to_thread(write_round, self.directory.round_dir(job))
        except Exception as error:  # noqa: BLE001  later rounds run even though the records of this one cannot be read
            self._note(job, f"no result could be computed: {type(error).__name__}: {error}")
            return
        self.observer.result(job, result)

    async def _evaluate(self, job: PlannedJob) -> None:
        """Evaluate the weights of a round; a failure is a finding on the round, not a failure of it."""
        is_checked = isinstance(job.job.work, TrainJob) and job.job.work.is_checked
        evaluation = evaluation_of(self.directory, job) if is_checked else None
        if evaluation is None:
            return
        report = partial(self.observer.preparing, job)
        try:
            await evaluate(self.directory, evaluation, self._launcher, self.fetch, self.stop, report)
        except AccelmarkError as error:
            self._note(job, f"its weights were not evaluated: {error}")

    def _note(self, job: PlannedJob, what: str) -> None:
        self._event_log.note("note", what, job.directory)
        self.observer.note(f"{job.directory}: {what}")

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


def _with_spares(plan: Plan, error: SpecError) -> tuple[Plan, list[str]]:
    """Return the plan with a spare for each host that ``error`` names, and a message for each; none without enough.

    A spare that turns out not to be ready is a host of the new plan, and is replaced in the same way.
    """
    hosts, spares = plan.cluster.hosts, plan.cluster.spares
    problems = {problem.where: problem.what for problem in error.problems}
    bad = [host.name for host in hosts if host.name in problems]
    if len(bad) > len(spares):
        return plan, []
    replacements = dict(zip(bad, spares, strict=False))
    changed = {"hosts": tuple(replacements.get(host.name, host) for host in hosts), "spares": spares[len(bad) :]}
    names = {name: spare.name for name, spare in replacements.items()}
    jobs = []
    for job in plan.jobs:
        nodes = (node.model_copy(update={"host": names.get(node.host, node.host)}) for node in job.nodes)
        jobs.append(job.model_copy(update={"nodes": tuple(nodes)}))
    notes = [f"host {name} {problems[name]}: it was replaced by the spare {spare}" for name, spare in names.items()]
    cluster = plan.cluster.model_copy(update=changed)
    return plan.model_copy(update={"cluster": cluster, "jobs": tuple(jobs)}), notes


def add_next_jobs(directory: RunDirectory, statuses: Mapping[str, JobStatus]) -> bool:
    """Add the next jobs of a search, if the run is one, to its plan, and register it; returns whether there are any."""
    if directory.plan.tuning is None:
        return False
    earlier = directory.plan
    plan = continued(earlier, directory.path, statuses)
    if plan is not earlier:
        directory.replace_plan(plan)
    register_plan(directory.path)  # also what an interrupted coordinator had not
    return plan is not earlier


def continued(plan: Plan, run_dir: Path, statuses: Mapping[str, JobStatus]) -> Plan:
    """Return the plan of a search with its next jobs; ``plan`` itself while a trial is due, or at its end."""
    tried = [job for at, job in enumerate(plan.jobs) if at == 0 or job.job.role == "trial"]
    if plan.tuning is None or any(job.job.role == "tuned" for job in plan.jobs):
        return plan
    if not all(statuses[job.directory].ended for job in tried):
        return plan
    results: dict[str, RoundResult] = {}
    for job in tried:
        with suppress(RunError):
            results[job.directory] = load_round(run_dir / job.directory / RESULT_FILE)
    tuning = plan.tuning
    scores = {identity(settings_of(job)): _score(run_dir, job, results.get(job.directory), tuning) for job in tried}
    shipped, best = settings_of(tried[0]), max(tried, key=lambda job: scores[identity(settings_of(job))])
    took_s = [sum(node.duration_s for node in result.nodes) for result in results.values()]
    # Another trial and the last rounds may take as long as the longest trial.
    needed_s = sum(took_s) + (tuning.num_least_rounds - 1) * max(took_s, default=0.0)
    has_trials = tuning.max_trials is None or len(tried) <= tuning.max_trials
    if has_trials and (tuning.budget_s is None or needed_s <= tuning.budget_s):
        proposed = next_trial(shipped, tuning.choices, scores)
        if proposed is not None:
            return with_trial(plan, proposed)
    return plan if best is tried[0] else with_tuned_rounds(plan, settings_of(best))


def _score(run_dir: Path, job: PlannedJob, result: RoundResult | None, tuning: TuningSpec) -> float:
    """Return the logarithm of the figure, negative where less is better; minus infinity for an invalid trial."""
    figure = result.value_of(FigureName(tuning.figure)) if result is not None else None
    if result is None or not figure or figure <= 0:
        return -math.inf
    if not is_eligible(result.state, audit_case(run_dir, {job.directory: result}, 1).findings):
        return -math.inf
    return math.log(figure) * (1 if tuning.better == "higher" else -1)


def stop(path: Path, *, at_once: bool) -> bool:
    """Stop the run at ``path``, also one whose coordinator has died, and wait; returns False if it had ended already.

    Raises RunError: its coordinator does not end, or a host with stale agents cannot be reached.
    """
    directory = RunDirectory.open(path)
    require_original(directory.path)
    process = directory.coordinator()
    if process is None:
        return _stop_without_coordinator(directory, at_once=at_once)
    if process.is_elsewhere:  # it looks for this file
        (directory.path / STOP_FILES[at_once]).touch()
    else:
        process.terminate()
        if at_once:
            time.sleep(0.2)
            process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while directory.coordinator() is not None:
        if time.monotonic() > deadline:
            kill = f"end it by 'kill -KILL {process.pid}' on {process.hostname}, and repeat this"
            advice = kill if at_once else "use --now"
            raise RunError(f"{path}: process {process.pid} did not stop the run within {_STOP_TIMEOUT_S:g} s: {advice}")
        time.sleep(0.1)
    return True


def _stop_without_coordinator(directory: RunDirectory, *, at_once: bool) -> bool:
    """Stop a dead coordinator's jobs, and return its hosts; return False if it left none."""
    statuses = directory.statuses().values()
    has_ended = all(status.ended for status in statuses)
    names = load_launcher(directory.plan.cluster.launcher).run_files
    holds_hosts = any((directory.path / name).exists() for name in names)  # an allocation that was not returned
    if has_ended and not holds_hosts and not any(status.state == "lost" for status in statuses):
        return False

    async def end_jobs() -> list[str]:
        if not has_ended:
            coordinator = Coordinator(directory, lambda *_: None, lambda *_: asyncio.sleep(0), RunObserver())
            for _ in range(1 + at_once):
                coordinator.stop.request("the run was stopped")
            await coordinator.resume()
        states = directory.statuses()
        lost = {node.host for job in directory.plan.jobs if states[job.directory].state == "lost" for node in job.nodes}
        async with create_launcher(directory.plan, directory.path) as launcher:
            return await launcher.end_stale_agents([host for host in directory.plan.cluster.hosts if host.name in lost])

    with directory.locked():
        if problems := asyncio.run(end_jobs()):
            raise RunError("\n".join(problems))
    return True
