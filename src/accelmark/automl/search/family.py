"""All networks of a search and who came from whom: the durable state that every searcher works on."""

from __future__ import annotations

from typing import Final, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from accelmark.automl.graph import Network
from accelmark.automl.morphs import Morph

Standing = Literal["pending", "observed", "lost"]

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20


class Individual(BaseModel):
    """A network that was proposed, and what became of it.

    ``value`` is what the search maximises (a predicted or reached accuracy on the validation split).
    ``parent`` is the individual whose network the ``morphs`` were applied to, in order; a seed has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int
    network: Network
    parent: int | None = None
    morphs: tuple[Morph, ...] = ()
    standing: Standing = "pending"
    value: float | None = None


class Family(BaseModel):
    """Every individual of one search. Its JSON is all that a searcher needs to go on."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    schema_version: Literal[1] = 1
    seed: int
    individuals: list[Individual]

    @staticmethod
    def started(seed_network: Network, seed: int) -> Family:
        """Return a family of the seed network alone, in training."""
        return Family(seed=seed, individuals=[Individual(id=0, network=seed_network)])

    @property
    def observed(self) -> tuple[Individual, ...]:
        """Those whose value is known."""
        return tuple(one for one in self.individuals if one.standing == "observed")

    @property
    def parents(self) -> tuple[Individual, ...]:
        """Those that may have children: the best few and the latest few observed; only their weights are kept."""
        observed = self.observed
        best = sorted(observed, key=lambda one: (worth(one), -one.id))[-BEST_PARENTS:]
        chosen = {one.id for one in (*best, *observed[-LATEST_PARENTS:])}
        return tuple(one for one in observed if one.id in chosen)

    @property
    def pending(self) -> tuple[Individual, ...]:
        """Those that are in training."""
        return tuple(one for one in self.individuals if one.standing == "pending")

    @property
    def best(self) -> Individual | None:
        """The individual with the highest value, the earlier one of equals."""
        return max(self.observed, key=lambda one: (worth(one), -one.id), default=None)

    def generator(self, purpose: int = 0) -> np.random.Generator:
        """Return the random source of the next proposal: a function of seed and family size alone."""
        return np.random.default_rng([self.seed, len(self.individuals), purpose])

    def add(self, network: Network, parent: int, morphs: tuple[Morph, ...]) -> Individual:
        """Take in a new network as pending and return it with its id."""
        newcomer = Individual(
            id=len(self.individuals), network=network, parent=parent, morphs=morphs, standing="pending"
        )
        self.individuals.append(newcomer)
        return newcomer

    def observe(self, individual: int, value: float) -> None:
        """Write down what an individual is worth."""
        self._change(individual, "observed", value)

    def lose(self, individual: int) -> None:
        """Write down that an individual's trial gave no value."""
        self._change(individual, "lost", None)

    def revive(self, individual: int) -> None:
        """Put an individual back into training."""
        self._change(individual, "pending", None)

    def _change(self, individual: int, standing: Standing, value: float | None) -> None:
        old = self.individuals[individual]
        self.individuals[individual] = old.model_copy(update={"standing": standing, "value": value})


def worth(individual: Individual) -> float:
    """Return an observed individual's value."""
    if individual.value is None:
        raise ValueError(f"individual {individual.id} has no value yet")
    return individual.value


class Searcher(Protocol):
    """Draws the next network; all that it knows is in the family."""

    @property
    def name(self) -> str:
        """What the searcher is called in configurations."""
        ...

    def propose(self, family: Family) -> Individual:
        """Add the next network to the family and return it. The same family gives the same answer.

        Raises MorphError when no network is allowed any more.
        """
        ...
