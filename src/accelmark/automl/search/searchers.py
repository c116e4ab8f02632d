"""Searchers: Bayesian optimization with a tree search, random morphs, regularized evolution, and no search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import count
from math import exp
from typing import Final, NamedTuple

import numpy as np

from accelmark.automl.model.morphs import MORPH_KINDS, Morph, MorphChoices, MorphError, MorphKind, MorphLimits
from accelmark.automl.model.network import Network
from accelmark.automl.records import Individual
from accelmark.automl.search.surrogate import DistanceTable, GaussianProcess, Reference, Sketch, Vector, sketch

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20
_ALIVE: Final = 20
_TOURNAMENT: Final = 5
_BETA: Final = 2.576
_END_TEMPERATURE: Final = 1e-4
_COOLING: Final = 0.5
_CHILDREN: Final = 4
_BEST: Final = 50
_LATEST: Final = 50
_PENDING: Final = 50


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
        return self.leaders(BEST_PARENTS, LATEST_PARENTS)

    def leaders(self, best: int, latest: int) -> list[Individual]:
        """Return the ``best`` and the ``latest`` observed individuals, in the order of their proposal."""
        observed = self.observed
        chosen = {one.id: one for one in (*nlargest(best, observed, key=lambda one: one.rank), *observed[-latest:])}
        return [chosen[number] for number in sorted(chosen)]

    def generator(self) -> np.random.Generator:
        """Return the random generator of the next proposal; it depends only on the seed and the population's size."""
        return np.random.default_rng([self.seed, len(self.individuals), 0])

    @property
    def points(self) -> list[dict[str, int]]:
        """Places of all individuals in the space of a sampler."""
        return [one.point for one in self.individuals if one.point is not None]

    def add(
        self,
        network: Network,
        parent: int,
        morphs: tuple[Morph, ...],
        *,
        point: dict[str, int] | None = None,
        round: int = 1,  # noqa: A002 - the field's name
    ) -> Individual:
        """Append a pending individual and return it."""
        made = Individual(
            id=len(self.individuals), network=network, parent=parent, morphs=morphs, point=point, round=round
        )
        self.individuals.append(made)
        return made


@dataclass(frozen=True)
class Searcher:
    """Proposes a random morph of a random possible parent; base of the other searchers.

    ``kinds`` of morphs are used, within the ``limits``; ``rounds`` are those of the schedule. Stateless except for
    caches.
    """

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)
    rounds: int = 1

    def propose(self, population: Population, number: int = 1) -> list[Individual]:
        """Add at most ``number`` networks to the population and return them; equal populations give equal proposals.

        Raises MorphError where no network may have a further child.
        """
        proposed = [self._next(population)]
        with suppress(MorphError):
            while len(proposed) < number:
                proposed.append(self._next(population))
        return proposed

    def _next(self, population: Population) -> Individual:
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

    def _next(self, population: Population) -> Individual:
        latest = (population.observed or population.individuals[:1])[-1]
        return population.add(latest.network, latest.id, ())


class _Point(NamedTuple):
    network: Network
    parent: int
    morphs: tuple[Morph, ...]


@dataclass(frozen=True)
class BayesianSearch(Searcher):
    """Proposes the networks with the highest upper confidence bounds that a best-first tree search visits.

    The search accepts worse nodes by simulated annealing: temperature from 1, times ``_COOLING`` per step. Pending
    networks count with their expected value, so that parallel trials differ. The best and the latest networks are
    fitted, and the latest pending ones, up to a cap of each, so that a proposal's cost does not grow with the search.
    """

    _table: DistanceTable = field(default_factory=DistanceTable, repr=False)
    _sketches: dict[int, tuple[Network, Sketch]] = field(default_factory=dict, repr=False)

    def propose(self, population: Population, number: int = 1) -> list[Individual]:
        """Add the next networks; random ones where fewer than two were observed or none can be found."""
        if len(population.observed) >= 2 and (found := self._walk(population, number)):
            return [population.add(*point) for point in found]
        return super().propose(population, number)

    def _walk(self, population: Population, number: int) -> list[_Point]:
        """Return the best networks on the way; none where no visited network allows a morph."""
        generator, observed = population.generator(), population.leaders(_BEST, _LATEST)
        fitted = [*observed, *population.pending[-_PENDING:]]
        # Hyperparameters may have been written into a network since.
        kept = {one.id: known for one in fitted if (known := self._sketches.get(one.id)) and known[0] is one.network}
        self._sketches.clear()
        self._sketches.update({one.id: kept.get(one.id) or (one.network, sketch(one.network)) for one in fitted})
        sketches = [known for _, known in self._sketches.values()]
        apart = self._table.of(sketches)
        values = np.array([one.value or 0.0 for one in observed])
        model = GaussianProcess.fitted(apart[: len(observed), : len(observed)], values).extended(apart)
        reference = Reference(sketches)

        def bound(distance: Vector) -> float:
            mean, deviation = model.predict(distance)
            return mean + _BETA * deviation

        parents = {one.id for one in population.parents}
        rows = zip(fitted, apart, strict=True)
        starts = [(-bound(row), one.id, _Point(one.network, one.id, ())) for one, row in rows if one.id in parents]
        heapq.heapify(starts)
        queue, order = starts, count(len(population.individuals))
        highest, temperature = -queue[0][0], 1.0
        candidates: dict[tuple[bytes, bytes], tuple[_Point, Sketch, Vector]] = {}
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
                drawn = sketch(child)
                distance = reference.distances(drawn)
                reached = bound(distance)
                grown = _Point(child, point.parent, (*point.morphs, morph))
                heapq.heappush(queue, (-reached, next(order), grown))
                highest = max(highest, reached)
                candidates.setdefault(drawn.key, (grown, drawn, distance))
        if not candidates:
            return []
        points, drawn_ones, crosses = zip(*candidates.values(), strict=True)
        mutual = np.zeros((len(points), len(points)))  # not needed for one
        if number > 1:
            among = Reference(drawn_ones)
            mutual = np.array([among.distances(one) for one in drawn_ones])
        return [points[row] for row in model.select(np.array(crosses), mutual, number, _BETA)]
