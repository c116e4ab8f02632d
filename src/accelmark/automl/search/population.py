"""All networks of a search with parents, morphs and values: the only state of a searcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from pydantic import AliasChoices, Field

from accelmark.automl.model.morphs import Morph
from accelmark.automl.model.network import Network
from accelmark.spec.model import Spec

IndividualStatus = Literal["pending", "observed", "lost"]

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20


class Individual(Spec):
    """A proposed network.

    ``value`` is what the search maximizes: reached or predicted accuracy on the validation split. ``parent`` is the
    individual to whose network the ``morphs`` were applied in order; the seed has none.
    """

    id: int
    network: Network
    parent: int | None = None
    morphs: tuple[Morph, ...] = ()
    status: IndividualStatus = Field("pending", validation_alias=AliasChoices("status", "standing"))
    value: float | None = None

    @property
    def rank(self) -> tuple[float, int]:
        """Key of an order by value, where of equal individuals the earlier one is better."""
        return self.value or 0.0, -self.id


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
