"""Searchers to compare with: random morphs, regularised evolution, and no search at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelmark.automl.morphs import MORPH_KINDS, MorphError, MorphKind, MorphLimits, random_morph
from accelmark.automl.search.family import Family, Individual, worth


@dataclass(frozen=True)
class RandomSearch:
    """Proposes a random morph of a random network that may have children."""

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)
    name: str = "random"

    def propose(self, family: Family) -> Individual:
        """Add the next network to the family and return it; raises MorphError when none is allowed."""
        generator = family.generator()
        parents = list(family.parents) or family.individuals[:1]
        while parents:
            parent = parents.pop(int(generator.integers(len(parents))))
            try:
                morph, child = random_morph(parent.network, generator, kinds=self.kinds, limits=self.limits)
            except MorphError:
                continue
            return family.add(child, parent.id, (morph,))
        raise MorphError("no network of the family allows a further morph")


@dataclass(frozen=True)
class EvolutionSearch:
    """Regularised evolution (Real et al. 2019): the best of a random few of the youngest has a child."""

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)
    population: int = 20
    tournament: int = 5
    name: str = "evolution"

    def propose(self, family: Family) -> Individual:
        """Add the next network to the family and return it; raises MorphError when none is allowed."""
        generator = family.generator()
        alive = list(family.observed[-self.population :]) or family.individuals[:1]
        size = min(self.tournament, len(alive))
        chosen = [alive[int(index)] for index in generator.choice(len(alive), size=size, replace=False)]
        for parent in sorted(chosen, key=lambda one: worth(one) if one.value is not None else 0.0, reverse=True):
            try:
                morph, child = random_morph(parent.network, generator, kinds=self.kinds, limits=self.limits)
            except MorphError:
                continue
            return family.add(child, parent.id, (morph,))
        raise MorphError("no network of the tournament allows a further morph")


@dataclass(frozen=True)
class NoSearch:
    """Proposes the seed again and again, from its last weights: training the seed longer."""

    name: str = "none"

    def propose(self, family: Family) -> Individual:
        """Add the seed once more, as the child of its latest training."""
        latest = family.observed[-1] if family.observed else family.individuals[0]
        return family.add(latest.network, latest.id, ())
