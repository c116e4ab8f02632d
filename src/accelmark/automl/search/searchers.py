"""Searchers: Bayesian optimization with a tree search, random morphs, regularized evolution, and no search."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count as counter
from math import exp
from typing import Final, Literal, get_args

import numpy as np

from accelmark.automl.model.morphs import MORPH_KINDS, Morph, MorphChoices, MorphError, MorphKind, MorphLimits
from accelmark.automl.model.network import Network
from accelmark.automl.search.population import Individual, Population, Searcher
from accelmark.automl.search.surrogate import GaussianProcess, Sketch, Vector, distances, sketch

SearchName = Literal["bayesian", "random", "evolution", "none"]
SEARCH_NAMES: Final[tuple[SearchName, ...]] = get_args(SearchName)


@dataclass(frozen=True)
class _Morphing:
    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)

    def _child_of_first(
        self, parents: Iterable[Individual], population: Population, generator: np.random.Generator
    ) -> Individual:
        """Add a random morph of the first parent that allows one."""
        for parent in parents:
            try:
                morph, child = MorphChoices(parent.network, self.limits).draw(generator, self.kinds)
            except MorphError:
                continue
            return population.add(child, parent.id, (morph,))
        raise MorphError("no possible parent allows a further morph")


@dataclass(frozen=True)
class RandomSearch(_Morphing):
    """Proposes a random morph of a random possible parent."""

    name: str = "random"

    def propose(self, population: Population) -> Individual:
        """Add the next network; raises MorphError where none is allowed."""
        generator = population.generator()
        parents = list(population.parents) or population.individuals[:1]

        def drawn() -> Iterable[Individual]:
            while parents:
                yield parents.pop(int(generator.integers(len(parents))))

        return self._child_of_first(drawn(), population, generator)


@dataclass(frozen=True)
class EvolutionSearch(_Morphing):
    """Regularized evolution (Real et al. 2019): the best of a random tournament of the youngest has a child."""

    alive: int = 20
    tournament: int = 5
    name: str = "evolution"

    def propose(self, population: Population) -> Individual:
        """Add the next network; raises MorphError where none is allowed."""
        generator = population.generator()
        alive = list(population.observed[-self.alive :]) or population.individuals[:1]
        size = min(self.tournament, len(alive))
        chosen = [alive[int(index)] for index in generator.choice(len(alive), size=size, replace=False)]
        ranked = sorted(chosen, key=lambda one: one.value or 0.0, reverse=True)
        return self._child_of_first(ranked, population, generator)


@dataclass(frozen=True)
class NoSearch:
    """Proposes the seed network again, continuing from its latest weights: trains the seed longer."""

    name: str = "none"

    def propose(self, population: Population) -> Individual:
        """Add the seed network as the child of its latest training."""
        latest = population.observed[-1] if population.observed else population.individuals[0]
        return population.add(latest.network, latest.id, ())


@dataclass(frozen=True, slots=True)
class _Point:
    network: Network
    parent: int
    morphs: tuple[Morph, ...]


@dataclass(frozen=True)
class BayesianSearch(_Morphing):
    """Proposes the network with the highest upper confidence bound that a best-first tree search finds.

    The search accepts worse nodes by simulated annealing: temperature from 1 to ``end_temperature``, times ``cooling``
    per step. Pending networks count with their expected value, so that parallel trials differ. At most ``memory``
    networks, the most recent and the best, are fitted.
    """

    beta: float = 2.576
    end_temperature: float = 1e-4
    cooling: float = 0.5
    children: int = 4
    memory: int = 300
    name: str = "bayesian"
    _sketches: dict[int, tuple[Network, Sketch]] = field(default_factory=dict, repr=False)
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    def propose(self, population: Population) -> Individual:
        """Add the next network; raises MorphError where none is allowed."""
        if len(population.observed) >= 2:
            model, fitted = self._fit(population)
            if (found := self._walk(population, model, fitted)) is not None:
                return population.add(found.network, found.parent, found.morphs)
        return RandomSearch(self.kinds, self.limits).propose(population)

    def _fit(self, population: Population) -> tuple[GaussianProcess, list[Individual]]:
        best = sorted(population.observed, key=lambda one: one.worth)[-self.memory // 2 :]
        recent = [one for one in population.observed if one not in best][-self.memory // 2 :]
        chosen = sorted([*best, *recent], key=lambda one: one.id)
        values = [one.worth for one in chosen]
        model = GaussianProcess.fitted(self._matrix(chosen), np.array(values))
        pending = population.pending
        if not pending:
            return model, chosen
        values += [model.predict(self._distances(one, chosen))[0] for one in pending]
        everyone = [*chosen, *pending]
        return GaussianProcess.fitted(self._matrix(everyone), np.array(values)), everyone

    def _walk(self, population: Population, model: GaussianProcess, fitted: list[Individual]) -> _Point | None:
        """Return the best network on the way; None where no visited network allows a morph."""
        generator = population.generator()
        sketches = [self._sketch(one) for one in fitted]

        def bound(distance: Vector) -> float:
            mean, deviation = model.predict(distance)
            return mean + self.beta * deviation

        order = counter()
        queue: list[tuple[float, int, _Point]] = []
        parents = {one.id for one in population.parents}
        for one in (each for each in fitted if each.id in parents):
            point = _Point(one.network, one.id, ())
            heapq.heappush(queue, (-bound(self._distances(one, fitted)), next(order), point))
        best: tuple[float, _Point] | None = None
        highest, temperature = -queue[0][0], 1.0
        while queue and temperature > self.end_temperature:
            value, _, point = heapq.heappop(queue)
            unit = model.deviation * temperature
            temperature *= self.cooling
            if exp(min(0.0, (-value - highest) / unit)) < generator.random():
                continue
            choices = MorphChoices(point.network, self.limits)
            for _ in range(self.children):
                try:
                    morph, child = choices.draw(generator, self.kinds)
                except MorphError:
                    break
                reached = bound(distances(sketch(child), sketches))
                grown = _Point(child, point.parent, (*point.morphs, morph))
                heapq.heappush(queue, (-reached, next(order), grown))
                highest = max(highest, reached)
                if best is None or reached > best[0]:
                    best = (reached, grown)
        return None if best is None else best[1]

    def _sketch(self, one: Individual) -> Sketch:
        known = self._sketches.get(one.id)
        if known is None or known[0] is not one.network:
            if known is not None:  # its hyperparameters were written into the network since
                for pair in [pair for pair in self._known if one.id in pair]:
                    del self._known[pair]
            self._sketches[one.id] = known = (one.network, sketch(one.network))
        return known[1]

    def _distances(self, one: Individual, others: list[Individual]) -> Vector:
        own = self._sketch(one)
        sketches = {other.id: self._sketch(other) for other in others}
        missing = [other.id for other in others if (one.id, other.id) not in self._known]
        for other_id, value in zip(missing, distances(own, [sketches[each] for each in missing]), strict=True):
            self._known[one.id, other_id] = self._known[other_id, one.id] = float(value)
        return np.array([self._known[one.id, other.id] for other in others])

    def _matrix(self, chosen: list[Individual]) -> Vector:
        return np.array([self._distances(one, chosen) for one in chosen])


_SEARCHERS: Final = {"bayesian": BayesianSearch, "random": RandomSearch, "evolution": EvolutionSearch}


def make_searcher(
    name: SearchName, kinds: tuple[MorphKind, ...] = MORPH_KINDS, limits: MorphLimits | None = None
) -> Searcher:
    """Return the searcher of that name."""
    return NoSearch() if name == "none" else _SEARCHERS[name](kinds, limits or MorphLimits())
