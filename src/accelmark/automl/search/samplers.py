"""Searchers over a space of widths and depths: all its points, samplers of libraries, and successive halving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

from accelmark.automl.config import SearchName
from accelmark.automl.model.morphs import Morph, MorphChoices, MorphError, MorphLimits, channel_groups
from accelmark.automl.model.network import Network, infer_shapes, main_chain
from accelmark.automl.records import Individual
from accelmark.automl.search.searchers import BayesianSearch, EvolutionSearch, NoSearch, Population, Searcher

_MOST_DOUBLINGS: Final = 3
_MOST_ADDED: Final = 2
_HISTORY: Final = 100
_ASKS: Final = 20
_REDUCTION: Final = 3

Tried = tuple[dict[str, int], float | None]
"""A point, and the value of its network; None while it trains."""

Stage = tuple[int, ...]
"""Height and width of the main chain's convolutions between two poolings or strides."""


def stages(network: Network) -> list[Stage]:
    """Return the stages of a network from the image on."""
    shapes = infer_shapes(network)
    return list(dict.fromkeys(shapes[name][1:] for name in main_chain(network) if name in network.convolutions))


def space(network: Network) -> dict[str, int]:
    """Return the largest value of what is searched: for each stage doublings of its filters, and added layers."""
    names = [f"{height}x{width}" for height, width in stages(network)]
    return {f"double {name}": _MOST_DOUBLINGS for name in names} | {f"deepen {name}": _MOST_ADDED for name in names}


def grown(
    network: Network, point: Mapping[str, int], limits: MorphLimits, generator: np.random.Generator
) -> tuple[Network, tuple[Morph, ...]]:
    """Return the network at a point of its space, and the morphs that lead to it.

    Raises MorphError where it exceeds the limits.
    """
    morphs: list[Morph] = []
    for stage in stages(network):
        height, width = stage
        for _ in range(point[f"double {height}x{width}"]):
            doubled: set[str] = set()
            while wider := [one for one in _choices(network, limits, "widen", stage) if one.at not in doubled]:
                doubled |= set(channel_groups(network)[wider[0].at])
                morph, network = MorphChoices(network, limits).make(wider[0], generator)
                morphs.append(morph)
        for _ in range(point[f"deepen {height}x{width}"]):
            for chosen in _choices(network, limits, "deepen", stage)[-1:]:
                morph, network = MorphChoices(network, limits).make(chosen, generator)
                morphs.append(morph)
    if not limits.allow(network):
        raise MorphError(f"{network.name!r} exceeds the limits at {dict(point)}")
    return network, tuple(morphs)


def _choices(network: Network, limits: MorphLimits, kind: Literal["widen", "deepen"], stage: Stage) -> list[Morph]:
    shapes = infer_shapes(network)
    return [morph for morph in MorphChoices(network, limits).of(kind) if shapes[morph.at][1:] == stage]


class BatchSearch(Searcher):
    """Tries every point of the space, one after the other; every network is grown from the seed."""

    def _next(self, population: Population) -> Individual:
        seed, generator, known = population.individuals[0].network, population.generator(), population.points
        for point in self.points(population, generator):
            if point not in known:
                with suppress(MorphError):
                    network, morphs = grown(seed, point, self.limits, generator)
                    return population.add(network, 0, morphs, point=point)
        raise MorphError("no further point of the space is within the limits")

    def points(self, population: Population, generator: np.random.Generator) -> Iterator[dict[str, int]]:
        """Yield points in the order in which they are tried."""
        ranges = {name: range(most + 1) for name, most in space(population.individuals[0].network).items()}
        yield from (dict(zip(ranges, point, strict=True)) for point in product(*ranges.values()))


class TpeSearch(BatchSearch):
    """Draws points by Optuna's TPE, to which networks in training count as bad.

    The first ones are the seed with all its filters doubled once, twice and three times, with and without a further
    layer in the last stage, where layers cost least. Where limits bound networks, the largest is the first.
    """

    def points(self, population: Population, generator: np.random.Generator) -> Iterator[dict[str, int]]:
        """Yield points in the order in which they are tried."""
        searched = space(population.individuals[0].network)
        is_bounded = self.limits.max_parameters or self.limits.max_forward_operations
        for doublings in range(1, _MOST_DOUBLINGS + 1)[:: -1 if is_bounded else 1]:
            wider = {name: doublings if name.startswith("double") else 0 for name in searched}
            yield from ({**wider, [*wider][-1]: 1}, wider)
        tried = [*population.leaders(_HISTORY, _HISTORY), *population.pending[-_HISTORY:]]
        known = [(dict(one.point), one.value) for one in tried if one.point is not None]
        yield from self.suggested(searched, known, int(generator.integers(2**31)))

    def suggested(self, searched: Mapping[str, int], known: Sequence[Tried], seed: int) -> Iterator[dict[str, int]]:
        """Yield the library's next points, given the largest value of each name and what was tried."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = TPESampler(seed=seed, n_startup_trials=6, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        ranges: dict[str, BaseDistribution] = {name: IntDistribution(0, most) for name, most in searched.items()}
        for point, value in known:
            state = TrialState.RUNNING if value is None else TrialState.COMPLETE
            study.add_trial(create_trial(state=state, value=value, params=point, distributions=ranges))
        for _ in range(_ASKS):
            yield dict(study.ask(ranges).params)


class AnnealSearch(TpeSearch):
    """Draws points by the simulated annealing of Hyperopt."""

    def suggested(self, searched: Mapping[str, int], known: Sequence[Tried], seed: int) -> Iterator[dict[str, int]]:
        """Yield the library's next points, given the largest value of each name and what was tried."""
        from hyperopt import Trials, anneal, hp  # takes three seconds
        from hyperopt.base import JOB_STATE_DONE, Domain

        domain = Domain(lambda _: 0.0, {name: hp.randint(name, most + 1) for name, most in searched.items()})
        trials = Trials()
        for number, (point, value) in enumerate((point, value) for point, value in known if value is not None):
            places = {"idxs": {name: [number] for name in point}, "vals": {name: [at] for name, at in point.items()}}
            misc = {"tid": number, "cmd": domain.cmd, "workdir": domain.workdir, **places}
            (trial,) = trials.new_trial_docs([number], [None], [{"status": "ok", "loss": -value}], [misc])
            trials.insert_trial_doc(trial | {"state": JOB_STATE_DONE})
        trials.refresh()
        for number in range(_ASKS):
            (drawn,) = anneal.suggest([len(known) + number], domain, trials, (seed + number) % 2**31)
            yield {name: int(at) for name, (at,) in drawn["misc"]["vals"].items()}


class SmacSearch(TpeSearch):
    """Draws points by SMAC (Lindauer et al. 2022): a random forest and expected improvement."""

    def suggested(self, searched: Mapping[str, int], known: Sequence[Tried], seed: int) -> Iterator[dict[str, int]]:
        """Yield the library's next points, given the largest value of each name and what was tried."""
        from ConfigSpace import Configuration, ConfigurationSpace, Integer  # with SMAC it takes seven seconds
        from smac import HyperparameterOptimizationFacade, Scenario
        from smac.runhistory import TrialInfo, TrialValue

        domain = ConfigurationSpace(seed=seed)
        domain.add([Integer(name, (0, most)) for name, most in searched.items()])
        with TemporaryDirectory(prefix="acmsmac-") as folder:
            scenario = Scenario(domain, deterministic=True, n_trials=10**6, seed=seed, output_directory=Path(folder))
            first = HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=1)
            smac = HyperparameterOptimizationFacade(
                scenario, lambda config, seed: 0.0, initial_design=first, overwrite=True, logging_level=False
            )
            for point, value in known:
                if value is not None:
                    tried = TrialInfo(Configuration(domain, values=point), seed=0)
                    smac.tell(tried, TrialValue(cost=-value), save=False)
            for _ in range(_ASKS):
                yield {name: int(at) for name, at in dict(smac.ask().config).items()}


class HalvingSearch(TpeSearch):
    """Successive halving (ASHA, Li et al. 2020): the best third of a round is trained further in the next one."""

    def _next(self, population: Population) -> Individual:
        promoted = {one.parent for one in population.individuals if one.round > 1}
        for number in range(self.rounds - 1, 0, -1):
            ended = [one for one in population.observed if one.round == number]
            best = sorted(ended, key=lambda one: one.rank, reverse=True)[: len(ended) // _REDUCTION]
            for one in best:
                if one.id not in promoted:
                    return population.add(one.network, one.id, (), point=one.point, round=number + 1)
        return super()._next(population)


SEARCHERS: Final[Mapping[SearchName, type[Searcher]]] = {
    "bayesian": BayesianSearch, "random": Searcher, "evolution": EvolutionSearch, "tpe": TpeSearch,
    "anneal": AnnealSearch, "smac": SmacSearch, "batch": BatchSearch, "halving": HalvingSearch, "none": NoSearch,
}  # fmt: skip
