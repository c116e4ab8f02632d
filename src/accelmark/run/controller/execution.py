"""Execute one job: write its files, prepare its hosts, start its agents, wait for their ends, and classify them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from accelmark.plan.plan import PlannedJob
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.rank_exit import NodeState, classify_job
from accelmark.run.controller.cancellation import Cancellation, run_in_daemon_thread
from accelmark.run.controller.node_jobs import node_jobs, write_job
from accelmark.run.controller.stall_cause import stall_cause
from accelmark.run.host import ConnectionLostError, HostError, UnreachableError
from accelmark.run.launchers.agent import AgentHandle
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.job import JobSpec, NodeExit
from accelmark.spec.log.records import DATA_FILE, DataRecord

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Ensures that a job's data is in its ``data_dirs`` and reports progress; raises DataError.

Returns a record of each data set, or None where it did not check."""
_RETRY_S: Final = 2.0
JobEnd = tuple[NodeState, str | None]
"""The state of a job and its first cause, which names host and rank where they are known."""


def _ignore(*_: object) -> None:
    """Do nothing."""


async def execute_job(
    directory: RunDirectory,
    job: PlannedJob,
    launcher: Launcher,
    fetch: FetchData,
    stop: Cancellation,
    *,
    from_checkpoint: bool = False,
    report: Callable[[str], None] = _ignore,
    on_start: Callable[[], None] = _ignore,
    tick: Callable[[], None] = _ignore,
    interval_s: float = 0.2,
) -> JobEnd:
    """Take a job to its end.

    Args:
        directory: the run's directory.
        job: the job.
        launcher: the launcher of the run's hosts.
        fetch: fetches data, where hosts share this machine's file system; other hosts fetch theirs.
        stop: a request ends the preparation, and then the ranks.
        from_checkpoint: whether to resume from a checkpoint of an earlier attempt, if there is one.
        report: receives steps of the preparation, from any thread.
        on_start: called before agents are started.
        tick: called about once in ``interval_s`` while agents run.
        interval_s: in seconds.

    Raises AccelmarkError: a host could not be prepared, or an agent not be started; UnreachableError where agents may
    still run on a host.
    """
    nodes = await write_job(directory, job, launcher, from_checkpoint=from_checkpoint)
    agents = launcher.agents(nodes)

    def fetch_data() -> None:
        if (records := fetch(nodes[0].job, report)) is not None:
            values = {name: record.model_dump(mode="json") for name, record in records.items()}
            write_atomic(directory.round_dir(job) / DATA_FILE, json.dumps(values, indent=2))

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

    Raises:
        UnreachableError: its connection was lost, and it stayed unreachable.
        AccelmarkError: it could not be prepared; nothing runs there.
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
    directory: RunDirectory,
    job: PlannedJob,
    launcher: Launcher,
    stop: Cancellation,
    on_start: Callable[[], None],
    tick: Callable[[], None],
) -> JobEnd | None:
    """Follow a job that an earlier coordinator started. If agents are missing, end the others and return None."""
    agents = launcher.agents(await node_jobs(directory, job, launcher))
    present = await asyncio.gather(*(agent.attach() for agent in agents))
    if not all(present):
        await _end([agent for agent, is_present in zip(agents, present, strict=True) if is_present])
        return None
    on_start()
    return await _wait(agents, stop, tick, 1.0)


async def _start(agents: Sequence[AgentHandle]) -> None:
    """Start the agents of a job on all of its hosts, or end those that were started."""
    started = await asyncio.gather(*(agent.start() for agent in agents), return_exceptions=True)
    failed = [error for error in started if isinstance(error, BaseException)]
    if not failed:
        return
    may_run = [
        agent
        for agent, error in zip(agents, started, strict=True)
        if error is None or isinstance(error, UnreachableError)
    ]
    ends = await _end(may_run)
    if lost := [end for end in ends if end.state == "lost"]:
        raise UnreachableError(lost[0].host, f"{failed[0]}; {lost[0].reason}") from failed[0]
    raise failed[0]


async def _end(agents: Sequence[AgentHandle]) -> list[NodeExit]:
    """Kill the ranks of running agents, and wait for the ends of the agents."""
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
