"""Bayesian search: a Gaussian process over edit distances, and a best-first tree with simulated annealing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count as counter
from math import exp
from typing import Final

import numpy as np

from accelmark.automl.graph import Network
from accelmark.automl.morphs import (
    MORPH_KINDS,
    Morph,
    MorphChoices,
    MorphError,
    MorphKind,
    MorphLimits,
)
from accelmark.automl.search.baselines import RandomSearch
from accelmark.automl.search.distance import Sketch, distances, sketch
from accelmark.automl.search.family import Family, Individual, worth
from accelmark.automl.search.gaussian import GaussianProcess, Vector

BETA: Final = 2.576


@dataclass(frozen=True, slots=True)
class Annealing:
    """How the tree is walked: temperature from ``start`` down to ``end``, times ``factor`` a step."""

    start: float = 1.0
    end: float = 1e-4
    factor: float = 0.5
    children: int = 4


@dataclass(frozen=True, slots=True)
class _Point:
    network: Network
    parent: int
    morphs: tuple[Morph, ...]


@dataclass
class BayesianSearch:
    """Proposes the network with the highest upper confidence bound that an annealed tree search finds.

    Networks in training count as worth what the process expects of them, so that parallel trials spread
    out. At most ``memory`` networks, the most recent and the best, are fitted.
    """

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)
    beta: float = BETA
    annealing: Annealing = field(default_factory=Annealing)
    memory: int = 300
    name: str = "bayesian"
    _sketches: dict[int, tuple[Network, Sketch]] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    def propose(self, family: Family) -> Individual:
        """Add the next network to the family and return it; raises MorphError when none is allowed."""
        at_random = RandomSearch(self.kinds, self.limits)
        if len(family.observed) < 2:
            return at_random.propose(family)
        model, known = self._fit(family)
        found = self._walk(family, model, known, family.generator())
        if found is None:
            return at_random.propose(family)
        return family.add(found.network, found.parent, found.morphs)

    def _fit(self, family: Family) -> tuple[GaussianProcess, list[Individual]]:
        observed = sorted(family.observed, key=worth)[-self.memory // 2 :]
        recent = [one for one in family.observed if one not in observed][-self.memory // 2 :]
        chosen = sorted([*observed, *recent], key=lambda one: one.id)
        model = GaussianProcess.fitted(self._matrix(chosen), np.array([worth(one) for one in chosen]))
        pending = family.pending
        if not pending:
            return model, chosen
        believed = [worth(one) for one in chosen]
        believed += [model.predict(self._distances(one, chosen))[0] for one in pending]
        everyone = [*chosen, *pending]
        return GaussianProcess.fitted(self._matrix(everyone), np.array(believed)), everyone

    def _walk(
        self, family: Family, model: GaussianProcess, known: list[Individual], generator: np.random.Generator
    ) -> _Point | None:
        """Return the best network that the walk came by; None when every one it stopped at has no room to grow."""
        sketches = [self._sketch(one) for one in known]

        def bound(distance: Vector) -> float:
            mean, deviation = model.predict(distance)
            return mean + self.beta * deviation

        order = counter()
        queue: list[tuple[float, int, _Point]] = []
        parents = {one.id for one in family.parents}
        for one in (each for each in known if each.id in parents):
            point = _Point(one.network, one.id, ())
            heapq.heappush(queue, (-bound(self._distances(one, known)), next(order), point))
        best: tuple[float, _Point] | None = None
        highest, temperature = -queue[0][0], self.annealing.start
        while queue and temperature > self.annealing.end:
            value, _, point = heapq.heappop(queue)
            unit = model.deviation * temperature
            temperature *= self.annealing.factor
            if exp(min(0.0, (-value - highest) / unit)) < generator.random():
                continue
            choices = MorphChoices(point.network, self.limits)
            for _ in range(self.annealing.children):
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
            if known is not None:  # its hyperparameters were written into it since
                self._rows = {pair: value for pair, value in self._rows.items() if one.id not in pair}
            self._sketches[one.id] = known = (one.network, sketch(one.network))
        return known[1]

    def _distances(self, one: Individual, others: list[Individual]) -> Vector:
        own, theirs = self._sketch(one), [self._sketch(other) for other in others]
        missing = [other for other in others if (one.id, other.id) not in self._rows]
        if missing:
            theirs = [self._sketch(other) for other in missing]
        new = distances(own, theirs) if missing else np.zeros(0)
        for other, value in zip(missing, new, strict=True):
            self._rows[one.id, other.id] = self._rows[other.id, one.id] = float(value)
        return np.array([self._rows[one.id, other.id] for other in others])

    def _matrix(self, chosen: list[Individual]) -> Vector:
        return np.array([self._distances(one, chosen) for one in chosen])
