"""Start, resume, stop and inspect runs, for the command line."""

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
from accelmark.run.controller.coordinator import Coordinator, FetchData, PreflightCheck, no_preflight
from accelmark.run.controller.job_waiter import Cancellation
from accelmark.run.display.displays import display
from accelmark.run.display.observer import RunObserver
from accelmark.run.launchers import create_launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.source import require_unchanged
from accelmark.run.sandboxes.image import require_images
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, RunError
from accelmark.spec.records import COORDINATOR_LOG

_STOP_TIMEOUT_S: Final = 90.0


@final
@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The summary of a run, and the exit code of the command line."""

    directory: Path
    summary: Summary
    exit_code: int


def start(
    plan: Plan, path: Path, fetch: FetchData, *, as_json: bool, preflight: PreflightCheck = no_preflight
) -> RunOutcome:
    """Carry out ``plan`` in a new directory at ``path``, after checking its hosts.

    Raises:
        HostsNotReadyError: hosts are not ready; nothing was started, and no directory is left.
        AccelmarkError: it could not start, and no directory is left; later failures are in the outcome.
    """
    require_images(plan)
    directory = RunDirectory.create(path, plan)
    try:
        return _carry_out(directory, fetch, Coordinator.run, preflight, as_json=as_json)
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
    preflight: PreflightCheck = no_preflight,
) -> RunOutcome:
    """Resume the run at ``path``, after checking the hosts of jobs that are started again.

    Raises:
        AccelmarkError: there is no run, another coordinator has locked it, a case has changed, or hosts are not ready.
    """
    directory = RunDirectory.open(path)
    require_unchanged(directory.plan, str(path))
    return _carry_out(
        directory,
        fetch,
        lambda coordinator: coordinator.resume(redo_failed=redo_failed, from_scratch=from_scratch),
        preflight,
        as_json=as_json,
    )


def stop(path: Path, *, at_once: bool) -> bool:
    """Stop the run at ``path`` and wait for its end; returns False if it had ended already.

    Raises:
        RunError: its coordinator does not end, or a host with stale agents cannot be reached.
    """
    directory = RunDirectory.open(path)
    holder = directory.holder()
    if holder is None:
        had_ended = all(status.ended for status in directory.statuses().values())
        if not had_ended:
            _end_orphaned_jobs(directory, at_once=at_once)
        return _end_lost_jobs(directory) or not had_ended
    holder.send(signal.SIGTERM)
    if at_once:
        time.sleep(0.2)
        holder.send(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while holder.alive and directory.holder() is not None:
        if time.monotonic() > deadline:
            raise RunError(f"{path}: process {holder.pid} did not stop the run within {_STOP_TIMEOUT_S:g} s: use --now")
        time.sleep(0.1)
    return True


def _carry_out(
    directory: RunDirectory,
    fetch: FetchData,
    drive: Callable[[Coordinator], Coroutine[Any, Any, Summary]],
    preflight: PreflightCheck,
    *,
    as_json: bool,
) -> RunOutcome:
    launcher = create_launcher(directory.plan, directory.path)

    async def body(shown: RunObserver) -> tuple[Summary, Cancellation]:
        cancellation = Cancellation()
        _handle_signals(cancellation, shown)
        summary = await drive(Coordinator(directory, launcher, shown, fetch, cancellation, preflight))
        return summary, cancellation

    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        stack.enter_context(_logging(directory))
        shown = stack.enter_context(display(directory.plan, str(directory.path), directory.statuses(), as_json=as_json))
        summary, cancellation = asyncio.run(body(shown))
    return RunOutcome(directory.path, summary, _exit_code(summary, cancellation))


@contextmanager
def _logging(directory: RunDirectory) -> Iterator[None]:
    """Write libraries' logs (asyncssh's above all) to ``coordinator.log`` at the run file's level."""
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


def _end_orphaned_jobs(directory: RunDirectory, *, at_once: bool) -> None:
    async def body() -> None:
        cancellation = Cancellation()
        if at_once:
            cancellation.request("the run was stopped")
        nothing: FetchData = lambda *_: None  # noqa: E731
        await Coordinator(
            directory, create_launcher(directory.plan, directory.path), RunObserver(), nothing, cancellation
        ).end()

    with directory.locked():
        asyncio.run(body())


def _end_lost_jobs(directory: RunDirectory) -> bool:
    """End agents of lost jobs; returns whether there are such jobs.

    Raises:
        RunError: one of their hosts cannot be reached.
    """
    statuses = directory.statuses()
    lost = {node.host for job in directory.plan.jobs if statuses[job.directory].state == "lost" for node in job.nodes}
    if not lost:
        return False

    async def body() -> list[str]:
        launcher = create_launcher(directory.plan, directory.path)
        try:
            return await launcher.end_stale_agents([host for host in directory.plan.cluster.hosts if host.name in lost])
        finally:
            await launcher.close()

    with directory.locked():
        problems = asyncio.run(body())
    if problems:
        raise RunError("\n".join(problems))
    return True


def _handle_signals(cancellation: Cancellation, shown: RunObserver) -> None:
    """On Ctrl-C and SIGTERM request a clean stop, then one at once, then exit."""

    def on_signal(name: str) -> None:
        cancellation.request(f"was interrupted by {name}")
        if cancellation.count == 1:
            shown.note("Stopping cleanly; results so far are kept. Press Ctrl-C again to stop at once.")
        elif cancellation.count > 2:
            os._exit(EXIT_CANCELLED)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, on_signal, "Ctrl-C")
    loop.add_signal_handler(signal.SIGTERM, on_signal, "a request to stop")


def _exit_code(summary: Summary, cancellation: Cancellation) -> int:
    if cancellation:
        return EXIT_CANCELLED
    good = summary.state == "succeeded" and all(
        case.verdict != "INVALID" or "synthetic" in case.marks for case in summary.cases
    )
    return EXIT_OK if good else EXIT_FAILED
