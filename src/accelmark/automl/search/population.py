"""All networks of a search with parents, morphs and values: the only state of a searcher."""

from __future__ import annotations

from typing import Final, Literal, Protocol

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from accelmark.automl.model.morphs import Morph
from accelmark.automl.model.network import Network

IndividualStatus = Literal["pending", "observed", "lost"]

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20


class Individual(BaseModel):
    """A proposed network.

    ``value`` is what the search maximizes: reached or predicted accuracy on the validation split. ``parent`` is the
    individual to whose network the ``morphs`` were applied in order; the seed has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    id: int
    network: Network
    parent: int | None = None
    morphs: tuple[Morph, ...] = ()
    status: IndividualStatus = Field("pending", validation_alias=AliasChoices("status", "standing"))
    value: float | None = None

    @property
    def worth(self) -> float:
        """The value of an observed individual."""
        if self.value is None:
            raise ValueError(f"individual {self.id} has no value yet")
        return self.value


class Population(BaseModel):
    """Every individual of one search, by id."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    seed: int
    individuals: list[Individual]

    @staticmethod
    def started(seed_network: Network, seed: int) -> Population:
        """Return a population of the seed network alone."""
        return Population(seed=seed, individuals=[Individual(id=0, network=seed_network)])

    def copied(self) -> Population:
        """Return a copy that another thread may add to."""
        return Population.model_construct(seed=self.seed, individuals=list(self.individuals))

    @property
    def observed(self) -> tuple[Individual, ...]:
        """Individuals with a value."""
        return tuple(one for one in self.individuals if one.status == "observed")

    @property
    def pending(self) -> tuple[Individual, ...]:
        """Individuals that wait for a trial or are in training."""
        return tuple(one for one in self.individuals if one.status == "pending")

    @property
    def parents(self) -> tuple[Individual, ...]:
        """Individuals that may have children: the best and the latest observed; only their weights are kept."""
        observed = self.observed
        best = sorted(observed, key=lambda one: (one.worth, -one.id))[-BEST_PARENTS:]
        chosen = {one.id for one in (*best, *observed[-LATEST_PARENTS:])}
        return tuple(one for one in observed if one.id in chosen)

    @property
    def best(self) -> Individual | None:
        """The individual with the highest value, the earlier one of equals."""
        return max(self.observed, key=lambda one: (one.worth, -one.id), default=None)

    def generator(self) -> np.random.Generator:
        """Return the random generator of the next proposal; it depends only on the seed and the population's size."""
        return np.random.default_rng([self.seed, len(self.individuals), 0])

    def add(self, network: Network, parent: int, morphs: tuple[Morph, ...]) -> Individual:
        """Append a pending individual and return it."""
        self.individuals.append(Individual(id=len(self.individuals), network=network, parent=parent, morphs=morphs))
        return self.individuals[-1]

    def set(self, individual: int, status: IndividualStatus, value: float | None) -> None:
        """Set the status and value of an individual."""
        old = self.individuals[individual]
        self.individuals[individual] = old.model_copy(update={"status": status, "value": value})


class Searcher(Protocol):
    """Proposes the next network; stateless except for caches."""

    @property
    def name(self) -> str:
        """Name in configurations."""
        ...

    def propose(self, population: Population) -> Individual:
        """Add the next network to the population and return it; equal populations give equal proposals.

        Raises:
            MorphError: no network may have a further child.
        """
        ...
