"""What the command line's verbs do with a run: carry it out, go on with it, look at it, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.plan.plan import Plan
from accelmark.results.schema import Summary
from accelmark.run.controller.coordinator import Coordinator, FetchData, Ready, unseen
from accelmark.run.controller.follow import StopRequest
from accelmark.run.display.observer import Silence
from accelmark.run.display.progress import Progress, ProgressReader
from accelmark.run.display.terminal import Display, display
from accelmark.run.launchers.choose import launcher_for
from accelmark.run.launchers.sandbox_of import refuse_missing_images
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.run.record.unchanged import refuse_changed
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RunError
from accelmark.spec.evidence import COORDINATOR_LOG
from accelmark.spec.number_format import duration

_STOP_PATIENCE_S: Final = 90.0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to, and what the command line ends with."""

    directory: Path
    summary: Summary
    exit_code: int


def start(plan: Plan, path: Path, fetch: FetchData, *, as_json: bool, ready: Ready = unseen) -> Outcome:
    """Carry out ``plan`` in a new directory at ``path``, once its hosts are ``ready``.

    Raises:
        NotReadyError: hosts are not ready; nothing was started, and no directory is left.
        AccelmarkError: it could not begin, and no directory is left; what fails later is in the outcome.
    """
    refuse_missing_images(plan)
    directory = RunDirectory.create(path, plan)
    try:
        return _carry_out(directory, fetch, Coordinator.run, ready, as_json=as_json)
    except BaseException:
        if not directory.events():
            directory.discard()
        raise


def resume(
    path: Path,
    fetch: FetchData,
    *,
    redo_failed: bool,
    from_scratch: bool,
    as_json: bool,
    ready: Ready = unseen,
) -> Outcome:
    """Go on with the run at ``path``; what is started again is once its hosts are ``ready``.

    Raises:
        AccelmarkError: there is no run, another coordinator holds it, a case has changed since, or hosts are not ready.
    """
    directory = RunDirectory.open(path)
    refuse_changed(directory.plan, str(path))
    return _carry_out(
        directory,
        fetch,
        lambda coordinator: coordinator.resume(redo_failed=redo_failed, from_scratch=from_scratch),
        ready,
        as_json=as_json,
    )


def stop(path: Path, *, at_once: bool) -> bool:
    """End the run at ``path``, whoever coordinates it, and wait for its end; returns False if it had ended already.

    Raises:
        RunError: its coordinator does not end.
    """
    directory = RunDirectory.open(path)
    holder = directory.holder()
    if holder is None:
        had_ended = all(status.ended for status in directory.statuses().values())
        if not had_ended:
            _end_orphans(directory, at_once=at_once)
        return _end_lost(directory) or not had_ended
    holder.send(signal.SIGTERM)
    if at_once:
        time.sleep(0.2)
        holder.send(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_PATIENCE_S
    while holder.alive and directory.holder() is not None:
        if time.monotonic() > deadline:
            raise RunError(
                f"{path}: process {holder.pid} has not ended the run after {_STOP_PATIENCE_S:g} s: use --now"
            )
        time.sleep(0.1)
    return True


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands, for ``status``."""

    directory: RunDirectory
    coordinator: int | None
    """Process number of the living coordinator; null where there is none."""
    statuses: dict[str, JobStatus]
    progress: dict[str, Progress]
    """Of the jobs that run."""


def standing(path: Path) -> Standing:
    """Read where the run at ``path`` stands; nothing is changed."""
    directory = RunDirectory.open(path)
    statuses = directory.statuses()
    progress = {}
    for job in directory.plan.jobs:
        if statuses[job.directory].state == "running":
            progress[job.directory] = ProgressReader(directory.node_dir(job, job.nodes[0]), job.job.work).read()
    holder = directory.holder()
    return Standing(directory, holder.pid if holder else None, statuses, progress)


def _carry_out(
    directory: RunDirectory,
    fetch: FetchData,
    drive: Callable[[Coordinator], Coroutine[Any, Any, Summary]],
    ready: Ready,
    *,
    as_json: bool,
) -> Outcome:
    launcher = launcher_for(directory.plan, directory.path)

    async def body(shown: Display) -> tuple[Summary, StopRequest]:
        stop_request = StopRequest()
        _listen(stop_request, shown)
        summary = await drive(Coordinator(directory, launcher, shown, fetch, stop_request, ready))
        return summary, stop_request

    with ExitStack() as stack:
        stack.enter_context(directory.held())
        stack.enter_context(_logging(directory))
        shown = stack.enter_context(display(directory.plan, str(directory.path), directory.statuses(), as_json=as_json))
        summary, stop_request = asyncio.run(body(shown))
    return Outcome(directory.path, summary, _exit_code(summary, stop_request))


@contextmanager
def _logging(directory: RunDirectory) -> Iterator[None]:
    """Write what libraries (of SSH, above all) log to ``coordinator.log``, as much as the run file asks for."""
    handler = logging.FileHandler(directory.path / COORDINATOR_LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, level = logging.getLogger(), directory.plan.log_level.upper()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def _end_orphans(directory: RunDirectory, *, at_once: bool) -> None:
    async def body() -> None:
        stop_request = StopRequest()
        if at_once:
            stop_request.ask("the run was stopped")
        nothing: FetchData = lambda *_: None  # noqa: E731
        await Coordinator(
            directory, launcher_for(directory.plan, directory.path), Silence(), nothing, stop_request
        ).end()

    with directory.held():
        asyncio.run(body())


def _end_lost(directory: RunDirectory) -> bool:
    """End agents of jobs that were given up as lost; returns whether there are such jobs.

    Raises:
        RunError: a host of theirs is still out of reach.
    """
    statuses = directory.statuses()
    lost = {node.host for job in directory.plan.jobs if statuses[job.directory].state == "lost" for node in job.nodes}
    if not lost:
        return False

    async def body() -> list[str]:
        launcher = launcher_for(directory.plan, directory.path)
        try:
            return await launcher.tidy([host for host in directory.plan.cluster.hosts if host.name in lost])
        finally:
            await launcher.close()

    with directory.held():
        problems = asyncio.run(body())
    if problems:
        left = duration(directory.plan.cluster.abandon_s)
        advice = f"what still runs there ends by itself when nobody has asked after it for {left}"
        raise RunError("\n".join([*problems, advice]))
    return True


def _listen(stop_request: StopRequest, shown: Display) -> None:
    """Have Ctrl-C (and SIGTERM) ask for a clean end, again for one at once, and a third time give up."""

    def asked(name: str) -> None:
        stop_request.ask(f"was interrupted by {name}")
        if stop_request.count == 1:
            shown.note("Ending cleanly, results so far are kept. Ctrl-C again ends at once.")
        elif stop_request.count > 2:
            os._exit(EXIT_CANCELLED)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, asked, "Ctrl-C")
    loop.add_signal_handler(signal.SIGTERM, asked, "a request to stop")


def _exit_code(summary: Summary, stop_request: StopRequest) -> int:
    if stop_request:
        return EXIT_CANCELLED
    good = summary.state == "succeeded" and all(
        case.verdict != "INVALID" or "synthetic" in case.marks for case in summary.cases
    )
    return EXIT_OK if good else EXIT_FAILED
