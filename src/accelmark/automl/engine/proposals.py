"""Next networks, worked out in the background while the accelerators train."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.journal import Proposed, Valued
from accelmark.automl.graph import Network
from accelmark.automl.morphs import MorphError
from accelmark.automl.schedule import Scheduler
from accelmark.automl.search import Family, Individual, make_searcher


class Proposals:
    """Keeps the scheduler's shelf filled; the family changes in the caller's thread only."""

    def __init__(self, config: AutomlConfig, family: Family, write: Callable[[Proposed | Valued], None]) -> None:
        search = config.search
        self.family: Final = family
        self._write: Final = write
        self._searcher = make_searcher(search.method, kinds=search.morphs, limits=search.limits)
        self._hasty = make_searcher(
            "none" if search.method == "none" else "random", kinds=search.morphs, limits=search.limits
        )
        self._pool: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._next: Future[tuple[Individual, float]] | None = None
        self._offered: set[int] = set()

    def begin(self, seed_network: Network) -> None:
        """Put the seed network into the family as its first individual."""
        self.family.individuals[:] = Family.started(seed_network, self.family.seed).individuals
        self._write(Proposed(individual=self.family.individuals[0], searcher="seed"))

    def fill(self, scheduler: Scheduler, *, wait: bool = False) -> None:
        """Take in what is ready and see that as many networks are prepared as the scheduler wants."""
        while True:
            self._collect(scheduler, wait=wait)
            if self._next is not None or scheduler.wanted() == 0:
                return
            family = Family(seed=self.family.seed, individuals=list(self.family.individuals))
            self._offered = {one.id for one in family.parents}
            self._next = self._pool.submit(self._timed, family)
            if not wait:
                return

    def _timed(self, family: Family) -> tuple[Individual, float]:
        began = time.monotonic()
        return self._searcher.propose(family), time.monotonic() - began

    def _collect(self, scheduler: Scheduler, *, wait: bool) -> None:
        if self._next is None or not (wait or self._next.done()):
            return
        try:
            one, seconds = self._next.result()
        except MorphError:
            scheduler.exhausted = True
        else:
            self._adopt(one, self._searcher.name, seconds, scheduler)
        self._next, self._offered = None, set()

    def needed(self) -> set[int]:
        """Return whose weights may still be asked for.

        That are all that may be a parent, also of the network that is being worked out right now, and the parents of
        all that are prepared or in training, whose trials may be tried again.
        """
        now = {one.id for one in self.family.parents}
        waiting = {one.parent for one in self.family.pending if one.parent is not None}
        return now | waiting | self._offered

    def hurry(self, scheduler: Scheduler) -> None:
        """Draw a network at once, at random, since a worker waits: an idle accelerator is worse than a guess."""
        if scheduler.wanted() == 0:
            return
        family = Family(seed=self.family.seed, individuals=list(self.family.individuals))
        began = time.monotonic()
        try:
            one = self._hasty.propose(family)
        except MorphError:
            return
        self._adopt(one, f"{self._hasty.name} (in a hurry)", time.monotonic() - began, scheduler)

    def _adopt(self, one: Individual, searcher: str, seconds: float, scheduler: Scheduler) -> None:
        adopted = one.model_copy(update={"id": len(self.family.individuals)})
        self.family.individuals.append(adopted)
        self._write(Proposed(individual=adopted, searcher=searcher, seconds=seconds))
        scheduler.offer(adopted.id)

    def update(self, one: Individual) -> None:
        """Exchange an individual, whose hyperparameters were written into its network."""
        self.family.individuals[one.id] = one
        self._write(Proposed(individual=one, searcher="hyperparameters"))

    def observe(self, individual: int, value: float) -> None:
        """Write down what a network is worth."""
        self.family.observe(individual, value)
        self._write(Valued(individual=individual, standing="observed", value=value))

    def lose(self, individual: int) -> None:
        """Write down that a network's trial gave nothing."""
        self.family.lose(individual)
        self._write(Valued(individual=individual, standing="lost", value=None))

    def close(self) -> None:
        """End the background thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
