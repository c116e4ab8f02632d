"""Where the next network comes from: Bayesian search and its baselines, behind one protocol."""

from __future__ import annotations

from typing import Final, Literal, get_args

from accelmark.automl.morphs import MORPH_KINDS, MorphKind, MorphLimits
from accelmark.automl.search.baselines import EvolutionSearch, NoSearch, RandomSearch
from accelmark.automl.search.bayesian import BETA, Annealing, BayesianSearch
from accelmark.automl.search.distance import Sketch, distances, sketch
from accelmark.automl.search.family import Family, Individual, Searcher, Standing, worth
from accelmark.automl.search.gaussian import GaussianProcess

SearchName = Literal["bayesian", "random", "evolution", "none"]
SEARCH_NAMES: Final[tuple[SearchName, ...]] = get_args(SearchName)


def make_searcher(
    name: SearchName, *, kinds: tuple[MorphKind, ...] = MORPH_KINDS, limits: MorphLimits | None = None
) -> Searcher:
    """Return the searcher of that name."""
    bounds = limits or MorphLimits()
    match name:
        case "bayesian":
            return BayesianSearch(kinds=kinds, limits=bounds)
        case "random":
            return RandomSearch(kinds=kinds, limits=bounds)
        case "evolution":
            return EvolutionSearch(kinds=kinds, limits=bounds)
        case "none":
            return NoSearch()


__all__ = [
    "BETA",
    "SEARCH_NAMES",
    "Annealing",
    "BayesianSearch",
    "EvolutionSearch",
    "Family",
    "GaussianProcess",
    "Individual",
    "NoSearch",
    "RandomSearch",
    "SearchName",
    "Searcher",
    "Sketch",
    "Standing",
    "distances",
    "make_searcher",
    "sketch",
    "worth",
]
