"""Wait for a job on all of its hosts: the first failure ends the other nodes, and so does a stop request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from accelmark.run.agent.rank_exit import NodeState, classify_job
from accelmark.run.launchers.agent import AgentHandle
from accelmark.spec.job import NodeExit


@final
class Cancellation:
    """Counts requests to cancel a run: the first stops it cleanly, the second at once."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = "was interrupted"
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return self.count > 0

    def request(self, reason: str | None = None) -> None:
        """Request a clean stop, or with a second request an immediate one."""
        self.count += 1
        if reason is not None and self.count == 1:
            self.reason = reason
        self._changed.set()

    async def wait_for_more_than(self, count: int) -> int:
        """Wait until there were more than ``count`` requests; returns their number."""
        while self.count <= count:
            self._changed.clear()
            await self._changed.wait()
        return self.count


@final
@dataclass(slots=True)
class JobWaiter:
    """Waits for the node agents of one job."""

    agents: Sequence[AgentHandle]
    stop: Cancellation
    tick: Callable[[], None]
    """Called about once a second."""
    interval_s: float = 1.0
    _ends: dict[int, NodeExit] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)

    async def wait(self) -> tuple[NodeState, str | None]:
        """Wait for all nodes; returns the job's state and its first cause."""
        waits = {asyncio.create_task(agent.wait()): agent for agent in self.agents}
        requested = asyncio.create_task(self.stop.wait_for_more_than(0))
        ticking = asyncio.create_task(self._tick())
        pending: set[asyncio.Task[NodeExit]] = set(waits)
        ending = False
        try:
            while pending:
                await asyncio.wait({*pending, requested}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task.done()]:
                    pending.discard(task)
                    self._note(task.result())
                if requested.done():
                    count = requested.result()
                    requested = asyncio.create_task(self.stop.wait_for_more_than(count))
                    ending = True
                    await self._stop([waits[task] for task in pending], at_once=count > 1)
                elif pending and not ending and any(end.state != "succeeded" for end in self._ends.values()):
                    ending = True
                    await self._stop([waits[task] for task in pending], at_once=False)
        finally:
            requested.cancel()
            ticking.cancel()
            await asyncio.gather(requested, ticking, return_exceptions=True)
        self.tick()
        return self._outcome()

    def _note(self, end: NodeExit) -> None:
        self._ends[end.noderank] = end
        self._order.append(end.noderank)

    async def _stop(self, agents: Sequence[AgentHandle], *, at_once: bool) -> None:
        await asyncio.gather(*(agent.stop(at_once=at_once) for agent in agents))

    async def _tick(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self.interval_s)

    def _outcome(self) -> tuple[NodeState, str | None]:
        state, reason = classify_job(tuple(self._ends.values()), self._order)
        if state == "cancelled" and self.stop:
            return state, f"{self.stop.reason}; measurements up to then are kept and marked partial"
        return state, reason
