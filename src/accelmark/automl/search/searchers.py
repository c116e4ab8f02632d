"""Searchers: Bayesian optimization with a tree search, random morphs, regularized evolution, and no search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf
from typing import Final, NamedTuple

import numpy as np

from accelmark.automl.config import SearchName
from accelmark.automl.model.morphs import MORPH_KINDS, Morph, MorphChoices, MorphError, MorphKind, MorphLimits
from accelmark.automl.model.network import Network
from accelmark.automl.records import Individual
from accelmark.automl.search.surrogate import GaussianProcess, Sketch, Vector, distances, sketch

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20
_ALIVE: Final = 20
_TOURNAMENT: Final = 5
_BETA: Final = 2.576
_END_TEMPERATURE: Final = 1e-4
_COOLING: Final = 0.5
_CHILDREN: Final = 4
_MEMORY: Final = 300


@dataclass(frozen=True, slots=True)
class Population:
    """Every individual of one search, by id."""

    seed: int
    individuals: list[Individual]

    @property
    def observed(self) -> list[Individual]:
        """Individuals with a value."""
        return [one for one in self.individuals if one.status == "observed"]

    @property
    def pending(self) -> list[Individual]:
        """Individuals that wait for a trial or are in training."""
        return [one for one in self.individuals if one.status == "pending"]

    @property
    def parents(self) -> list[Individual]:
        """Individuals that may have children: the best and the latest observed; only their weights are kept."""
        observed = self.observed
        best = sorted(observed, key=lambda one: one.rank)[-BEST_PARENTS:]
        chosen = {one.id for one in (*best, *observed[-LATEST_PARENTS:])}
        return [one for one in observed if one.id in chosen]

    def generator(self) -> np.random.Generator:
        """Return the random generator of the next proposal; it depends only on the seed and the population's size."""
        return np.random.default_rng([self.seed, len(self.individuals), 0])

    def add(self, network: Network, parent: int, morphs: tuple[Morph, ...]) -> Individual:
        """Append a pending individual and return it."""
        self.individuals.append(Individual(id=len(self.individuals), network=network, parent=parent, morphs=morphs))
        return self.individuals[-1]


@dataclass(frozen=True)
class Searcher:
    """Proposes a random morph of a random possible parent; base of the other searchers.

    ``kinds`` of morphs are used, within the ``limits``. Stateless except for caches.
    """

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)

    def propose(self, population: Population) -> Individual:
        """Add the next network to the population and return it; equal populations give equal proposals.

        Raises MorphError where no network may have a further child.
        """
        generator = population.generator()
        for parent in self._parents(population, generator):
            with suppress(MorphError):
                morph, child = MorphChoices(parent.network, self.limits).draw(generator, self.kinds)
                return population.add(child, parent.id, (morph,))
        raise MorphError("no possible parent allows a further morph")

    def _parents(self, population: Population, generator: np.random.Generator) -> Iterator[Individual]:
        """Yield parents in the order in which they are tried."""
        parents = population.parents or population.individuals[:1]
        while parents:
            yield parents.pop(int(generator.integers(len(parents))))


class EvolutionSearch(Searcher):
    """Regularized evolution (Real et al. 2019): the best of a random tournament of the youngest has a child."""

    def _parents(self, population: Population, generator: np.random.Generator) -> Iterator[Individual]:
        alive = population.observed[-_ALIVE:] or population.individuals[:1]
        chosen = generator.choice(len(alive), size=min(_TOURNAMENT, len(alive)), replace=False)
        yield from sorted((alive[int(index)] for index in chosen), key=lambda one: one.value or 0.0, reverse=True)


class NoSearch(Searcher):
    """Proposes the seed network again, continuing from its latest weights: trains the seed longer."""

    def propose(self, population: Population) -> Individual:
        """Add the seed network as the child of its latest training."""
        latest = (population.observed or population.individuals[:1])[-1]
        return population.add(latest.network, latest.id, ())


class _Point(NamedTuple):
    network: Network
    parent: int
    morphs: tuple[Morph, ...]


@dataclass(frozen=True)
class BayesianSearch(Searcher):
    """Proposes the network with the highest upper confidence bound that a best-first tree search finds.

    The search accepts worse nodes by simulated annealing: temperature from 1, times ``_COOLING`` per step. Pending
    networks count with their expected value, so that parallel trials differ. At most ``_MEMORY`` networks, the most
    recent and the best, are fitted.
    """

    _sketches: dict[int, tuple[Network, Sketch]] = field(default_factory=dict, repr=False)
    _known: dict[tuple[Sketch, Sketch], float] = field(default_factory=dict, repr=False)

    def propose(self, population: Population) -> Individual:
        """Add the next network; a random one where fewer than two were observed or none can be found."""
        if len(population.observed) >= 2:
            model, fitted = self._fit(population)
            if (found := self._walk(population, model, fitted)) is not None:
                return population.add(*found)
        return super().propose(population)

    def _fit(self, population: Population) -> tuple[GaussianProcess, list[Individual]]:
        best = sorted(population.observed, key=lambda one: one.value or 0.0)[-_MEMORY // 2 :]
        recent = [one for one in population.observed if one not in best][-_MEMORY // 2 :]
        chosen = sorted([*best, *recent], key=lambda one: one.id)
        values = [one.value or 0.0 for one in chosen]
        model = GaussianProcess.fitted(self._matrix(chosen), np.array(values))
        if not (pending := population.pending):
            return model, chosen
        values += [model.predict(self._distances(one, chosen))[0] for one in pending]
        chosen += pending
        return GaussianProcess.fitted(self._matrix(chosen), np.array(values)), chosen

    def _walk(self, population: Population, model: GaussianProcess, fitted: list[Individual]) -> _Point | None:
        """Return the best network on the way; None where no visited network allows a morph."""
        generator = population.generator()
        sketches = [self._sketch(one) for one in fitted]

        def bound(distance: Vector) -> float:
            mean, deviation = model.predict(distance)
            return mean + _BETA * deviation

        order = count()
        parents = {one.id for one in population.parents}
        queue = [
            (-bound(self._distances(one, fitted)), next(order), _Point(one.network, one.id, ()))
            for one in fitted
            if one.id in parents
        ]
        heapq.heapify(queue)
        best: tuple[float, _Point | None] = (-inf, None)
        highest, temperature = -queue[0][0], 1.0
        while queue and temperature > _END_TEMPERATURE:
            value, _, point = heapq.heappop(queue)
            unit = model.deviation * temperature
            temperature *= _COOLING
            if exp(min(0.0, (-value - highest) / unit)) < generator.random():
                continue
            choices = MorphChoices(point.network, self.limits)
            for _ in range(_CHILDREN):
                try:
                    morph, child = choices.draw(generator, self.kinds)
                except MorphError:
                    break
                reached = bound(distances(sketch(child), sketches))
                grown = _Point(child, point.parent, (*point.morphs, morph))
                heapq.heappush(queue, (-reached, next(order), grown))
                highest = max(highest, reached)
                if reached > best[0]:
                    best = (reached, grown)
        return best[1]

    def _sketch(self, one: Individual) -> Sketch:
        known = self._sketches.get(one.id)
        if known is None or known[0] is not one.network:  # hyperparameters may have been written into the network
            self._sketches[one.id] = known = (one.network, sketch(one.network))
        return known[1]

    def _distances(self, one: Individual, others: list[Individual]) -> Vector:
        own, sketches = self._sketch(one), [self._sketch(other) for other in others]
        missing = [other for other in sketches if (own, other) not in self._known]
        for other, value in zip(missing, distances(own, missing), strict=True):
            self._known[own, other] = self._known[other, own] = float(value)
        return np.array([self._known[own, other] for other in sketches])

    def _matrix(self, chosen: list[Individual]) -> Vector:
        return np.array([self._distances(one, chosen) for one in chosen])


SEARCHERS: Final[Mapping[SearchName, type[Searcher]]] = {
    "bayesian": BayesianSearch, "random": Searcher, "evolution": EvolutionSearch, "none": NoSearch,
}  # fmt: skip
