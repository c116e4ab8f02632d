"""Stop a run, also one whose coordinator has died."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Final

from accelmark.run.agent.task import STOP_FILES
from accelmark.run.controller.coordinator import Coordinator
from accelmark.run.display.displays import RunObserver
from accelmark.run.launchers import create_launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.registry import require_original
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.launcher import load_launcher

_STOP_TIMEOUT_S: Final = 90.0


def stop(path: Path, *, at_once: bool) -> bool:
    """Stop the run at ``path`` and wait for its end; returns False if it had ended already.

    Raises:
        RequestError: the directory is a copy.
        RunError: its coordinator does not end, or a host with stale agents cannot be reached.
    """
    directory = RunDirectory.open(path)
    require_original(directory.path)
    holder = directory.holder()
    process = holder or directory.holder_elsewhere()
    if process is None:
        return _stop_without_coordinator(directory, at_once=at_once)
    if holder is not None:
        holder.send(signal.SIGTERM)
        if at_once:
            time.sleep(0.2)
            holder.send(signal.SIGTERM)
    else:  # its coordinator looks for this file
        (directory.path / STOP_FILES[at_once]).touch()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while directory.holder() or directory.holder_elsewhere():
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
    with directory.locked():
        if not has_ended:
            asyncio.run(_end_orphaned_jobs(directory, at_once=at_once))
        asyncio.run(_end_lost_jobs(directory))
    return True


async def _end_orphaned_jobs(directory: RunDirectory, *, at_once: bool) -> None:
    """Stop jobs that a dead coordinator left running, and cancel all others that have not ended."""

    async def no_preflight(*_: object) -> None:
        """Nothing is started."""

    coordinator = Coordinator(directory, lambda *_: None, no_preflight, RunObserver())
    for _ in range(1 + at_once):
        coordinator.stop.request("the run was stopped")
    await coordinator.resume()


async def _end_lost_jobs(directory: RunDirectory) -> None:
    """End agents of lost jobs. Raises RunError: some of their hosts cannot be reached."""
    statuses = directory.statuses()
    lost = {node.host for job in directory.plan.jobs if statuses[job.directory].state == "lost" for node in job.nodes}
    launcher = create_launcher(directory.plan, directory.path)
    try:
        hosts = [host for host in directory.plan.cluster.hosts if host.name in lost]
        problems = await launcher.end_stale_agents(hosts)
    finally:
        await launcher.close()
    if problems:
        raise RunError("\n".join(problems))
