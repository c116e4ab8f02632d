"""Prepare the next networks in the background while workers train."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from accelmark.automl.config import AutomlConfig, SearchName
from accelmark.automl.controller.journal import Proposed, SearchState
from accelmark.automl.model.morphs import MorphError
from accelmark.automl.records import Individual
from accelmark.automl.search.schedule import Scheduler
from accelmark.automl.search.searchers import SEARCHERS, Population, Searcher


class Proposals:
    """Keeps the scheduler supplied with networks; state changes in the caller's thread only, through ``write``."""

    def __init__(
        self, config: AutomlConfig, state: SearchState, scheduler: Scheduler, write: Callable[[Proposed], None]
    ) -> None:
        search = config.search
        self._seed: Final = config.seed
        self._state: Final = state
        self._scheduler: Final = scheduler
        self._write: Final = write
        self._method: Final = search.method
        self._fallback: Final[SearchName] = "none" if search.method == "none" else "random"
        names = {self._method, self._fallback}
        self._searchers: Final = {name: SEARCHERS[name](search.morphs, search) for name in names}
        self._pool: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._next: Future[tuple[Individual, float]] | None = None
        self._possible_parents: set[int] = set()
        """Of the network that is being prepared."""

    def fill(self, *, wait: bool = False) -> None:
        """Add the network that is ready and prepare as many as the scheduler requests; ``wait`` for them."""
        while True:
            if self._next is not None and (wait or self._next.done()):
                try:
                    self._add(*self._next.result(), self._method)
                except MorphError:
                    self._scheduler.exhausted = True
                self._next, self._possible_parents = None, set()
            if self._next is not None or self._scheduler.wanted() == 0:
                return
            population = self._population()
            self._possible_parents = {one.id for one in population.parents}
            self._next = self._pool.submit(_timed, self._searchers[self._method], population)
            if not wait:
                return

    def add_random(self) -> None:
        """Add a random morph at once; used where a worker would have to wait for the searcher."""
        with suppress(MorphError):
            if self._scheduler.wanted():
                found = _timed(self._searchers[self._fallback], self._population())
                self._add(*found, f"{self._fallback} (immediate)")

    def _add(self, one: Individual, seconds: float, searcher: str) -> None:
        added = one.model_copy(update={"id": len(self._state.individuals)})
        self._write(Proposed(individual=added, searcher=searcher, seconds=seconds))
        self._scheduler.ready.append(added.id)

    def needed_weights(self) -> set[int | None]:
        """Return the individuals whose weights may be needed.

        These are all possible parents, also of the network in preparation, and the parents of pending networks, whose
        trials may be retried.
        """
        population = self._population()
        of_pending = {one.parent for one in population.pending}
        return of_pending.union((one.id for one in population.parents), self._possible_parents)

    def _population(self) -> Population:
        return Population(self._seed, list(self._state.individuals))

    def close(self) -> None:
        """End the background thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _timed(searcher: Searcher, population: Population) -> tuple[Individual, float]:
    began = time.monotonic()
    return searcher.propose(population), time.monotonic() - began
