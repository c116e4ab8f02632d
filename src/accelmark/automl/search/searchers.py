"""Searchers: tree search by Bayesian optimization, random morphs, evolution, and samplers of widths and depths.

Predicted accuracies guide them: a Gaussian process over edit distances, and learning curves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import count, product
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial
from scipy.linalg import solve_triangular
from scipy.optimize import linear_sum_assignment

from accelmark.automl.config import SearchName
from accelmark.automl.model import graph
from accelmark.automl.model.graph import Network, Shape, infer_shapes, main_chain, skips
from accelmark.automl.model.morphs import (
    MORPH_KINDS,
    Morph,
    MorphChoices,
    MorphError,
    MorphKind,
    MorphLimits,
    channel_groups,
)
from accelmark.automl.records import Individual

BEST_PARENTS: Final = 16
LATEST_PARENTS: Final = 20
_ALIVE: Final = 20
_TOURNAMENT: Final = 5
_BETA: Final = 2.576
_END_TEMPERATURE: Final = 1e-4
_COOLING: Final = 0.5
_CHILDREN: Final = 4
_FITTED: Final = 50
"""Most networks of each kind that are fitted: best, latest, pending."""
_MOST_DOUBLINGS: Final = 3
_MOST_ADDED: Final = 2
_HISTORY: Final = 100
_ASKS: Final = 20
_REDUCTION: Final = 3
_WIDTH_COST: Final = 0.25
_KERNEL_COST: Final = 0.125
_SKIP_WEIGHT: Final = 0.5
_SCALES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_NOISES: Final = (1e-3, 1e-2, 1e-1, 3e-1)
_CURVE_SHIFTS: Final = np.geomspace(0.05, 200.0, 60)
_CURVE_MIN_EPOCHS: Final = 3

Vector = NDArray[np.float64]
Point = dict[str, int]
"""Doublings of the filters and added layers of each stage."""
Tried = tuple[Point, float | None]
"""A point, and the value of its network; None while it trains."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The features that the distance compares; equal features are equal sketches."""

    layers: Vector
    """A row (kind, log2 width, kernel, stride) per convolution, dense layer and pooling of the main chain."""
    skips: Vector
    """A row (start, end, 1 for concat) per skip."""

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The features as bytes."""
        return self.layers.tobytes(), self.skips.tobytes()


def sketch(network: Network) -> Sketch:
    """Return the features of a network."""
    rows: list[tuple[float, ...]] = []
    for name in main_chain(network):
        match network.by_name[name].layer:
            case graph.Convolution(filters=filters) as layer:
                rows.append((0, np.log2(filters), layer.kernel, layer.stride))
            case graph.Dense(units=units):
                rows.append((1, np.log2(units), 1, 1))
            case graph.MaxPool() | graph.AveragePool() as layer:
                rows.append((2 if isinstance(layer, graph.MaxPool) else 3, 0, layer.kernel, layer.stride))
    joined = [(skip.start, skip.end, skip.merge == "concat") for skip in skips(network)]
    return Sketch(*(np.array(table, np.float64).reshape(-1, width) for table, width in ((rows, 4), (joined, 3))))


class Reference:
    """Sketches to which the edit distances of many others are computed: symmetric, 0 to itself.

    Inserting or removing a layer costs 1; changing one costs 1/4 per doubling of its width and 1/8 per pixel of its
    kernel, at most 1; changing its kind or stride costs 1. Skips are paired for the least total cost.
    """

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self._lengths: Final = np.array([len(one.layers) for one in sketches])
        self._kinds, numbers = np.unique(np.concatenate([one.layers for one in sketches]), axis=0, return_inverse=True)
        self._rows: Final = np.zeros((len(sketches), int(self._lengths.max())), np.intp)
        """Numbers of the layers' kinds, padded."""
        self._rows[np.arange(self._rows.shape[1]) < self._lengths[:, None]] = numbers.ravel()
        distinct = {one.skips.tobytes(): one.skips for one in sketches}
        place = {key: number for number, key in enumerate(distinct)}
        self._skips: Final = list(distinct.values())
        self._skips_of: Final = np.array([place[one.skips.tobytes()] for one in sketches])

    def distances(self, one: Sketch) -> Vector:
        """Return the distance of a sketch to each of the reference."""
        # Levenshtein distances by dynamic programming, one row at a time, for all of the reference at once.
        columns = np.arange(self._rows.shape[1] + 1, dtype=np.float64)
        table = np.tile(columns, (len(self._rows), 1))
        apart = np.abs(self._kinds[:, None] - one.layers)
        change = np.minimum(1.0, _WIDTH_COST * apart[:, :, 1] + _KERNEL_COST * apart[:, :, 2])
        change[(apart[:, :, 0] > 0) | (apart[:, :, 3] > 0)] = 1.0
        for number in range(len(one.layers)):
            best = table + 1.0
            best[:, 1:] = np.minimum(best[:, 1:], table[:, :-1] + change[self._rows, number])
            best -= columns
            table = np.minimum.accumulate(best, axis=1, out=best) + columns  # insertions, each costing 1
        skips_apart = np.array([_skip_distance(one.skips, other) for other in self._skips])
        result: Vector = table[np.arange(len(table)), self._lengths] + _SKIP_WEIGHT * skips_apart[self._skips_of]
        return result


class DistanceTable:
    """Mutual distances of the sketches of the last call; a call computes those of sketches that it adds."""

    def __init__(self) -> None:
        self._place: dict[tuple[bytes, bytes], int] = {}
        self._table: Vector = np.zeros((0, 0))

    def of(self, sketches: Sequence[Sketch]) -> Vector:
        """Return the distances (n, n)."""
        table, keys = np.zeros((len(sketches), len(sketches))), [one.key for one in sketches]
        known = [number for number, key in enumerate(keys) if key in self._place]
        before = [self._place[keys[number]] for number in known]
        table[np.ix_(known, known)] = self._table[np.ix_(before, before)]
        if added := sorted(set(range(len(sketches))) - set(known)):
            reference = Reference(sketches)
            for number in added:
                table[number] = table[:, number] = reference.distances(sketches[number])
        self._place, self._table = {key: number for number, key in enumerate(keys)}, table
        return table


def _skip_distance(one: Vector, other: Vector) -> float:
    if not len(one) or not len(other):
        return float(len(one) + len(other))
    if one.shape == other.shape and np.array_equal(one, other):
        return 0.0
    apart = np.abs(one[:, None, :] - other[None, :, :])
    cost = (apart[:, :, 0] + apart[:, :, 1]) / (1.0 + one[:, :2].max() + other[:, :2].max())
    cost = np.minimum(1.0, cost + 0.5 * apart[:, :, 2])
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum() + abs(len(one) - len(other)))


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """A posterior over standardized values; length scale and noise maximize the marginal likelihood over a grid."""

    scale: float
    noise: float
    mean: float
    deviation: float
    _lower: Vector
    """Cholesky factor of the kernel with noise."""
    _whitened: Vector
    """The factor's inverse times the standardized values."""

    @staticmethod
    def fitted(distance: Vector, values: Vector) -> GaussianProcess:
        """Fit to ``values`` (n,) of networks with mutual distances ``distance`` (n, n)."""
        mean, deviation = float(values.mean()), float(values.std())
        deviation = deviation if deviation > 1e-9 else 1.0
        scaled = (values - mean) / deviation
        apart = distance[distance > 0]
        typical = float(np.median(apart)) if apart.size else 1.0
        best = -np.inf, 0.0, 0.0
        for scale in (typical * factor for factor in _SCALES):
            eigenvalues, vectors = np.linalg.eigh(_rbf(distance, scale))
            projected = (scaled @ vectors) ** 2
            for noise in _NOISES:
                spectrum = np.maximum(eigenvalues, 0.0) + noise
                best = max(best, (-0.5 * float((projected / spectrum + np.log(spectrum)).sum()), scale, noise))
        _, scale, noise = best
        lower = _factor(distance, scale, noise)
        return GaussianProcess(scale, noise, mean, deviation, lower, solve_triangular(lower, scaled, lower=True))

    def extended(self, distance: Vector) -> GaussianProcess:
        """Return the process with further networks in training, last in ``distance``, at their expected values."""
        count = len(self._whitened)
        lower = _factor(distance, self.scale, self.noise)
        whitened = solve_triangular(lower[:count, :count], self._lower @ self._whitened, lower=True)
        return replace(self, _lower=lower, _whitened=np.append(whitened, np.zeros(len(distance) - count)))

    def predict(self, distance: Vector) -> tuple[float, float]:
        """Return mean and standard deviation of a network's value from its distances to the fitted networks."""
        cross = solve_triangular(self._lower, _rbf(distance, self.scale), lower=True)
        deviation = float(np.sqrt(max(1.0 - float(cross @ cross), 0.0)))
        return self.mean + self.deviation * float(cross @ self._whitened), self.deviation * deviation

    def select(self, distance: Vector, mutual: Vector, number: int, beta: float) -> list[int]:
        """Return the rows of ``number`` candidates with the highest upper confidence bounds, one after the other.

        ``distance`` (m, n) is that of the candidates to the fitted networks, ``mutual`` (m, m) that among them.
        """
        cross = solve_triangular(self._lower, _rbf(distance, self.scale).T, lower=True)
        means, covariance = cross.T @ self._whitened, _rbf(mutual, self.scale) - cross.T @ cross
        chosen: list[int] = []
        while len(chosen) < min(number, len(means)):
            bounds = means + beta * np.sqrt(np.maximum(np.diag(covariance), 0.0))
            bounds[chosen] = -np.inf
            chosen.append(int(np.argmax(bounds)))
            deviations = np.sqrt(np.maximum(np.diag(covariance), 0.0))
            most = deviations * deviations[chosen[-1]]  # an edit distance need not give a valid covariance
            column = np.clip(covariance[:, chosen[-1]], -most, most)
            covariance = covariance - np.outer(column, column) / (deviations[chosen[-1]] ** 2 + self.noise)
        return chosen


def _factor(distance: Vector, scale: float, noise: float) -> Vector:
    """Return the Cholesky factor of the kernel with noise, without negative eigenvalues that edit distances give."""
    eigenvalues, vectors = np.linalg.eigh(_rbf(distance, scale))
    kernel = (vectors * (np.maximum(eigenvalues, 0.0) + noise)) @ vectors.T
    factor: Vector = np.linalg.cholesky((kernel + kernel.T) / 2)
    return factor


def _rbf(distance: Vector, scale: float) -> Any:
    return np.exp(-0.5 * (distance / scale) ** 2)


def predicted_accuracy(accuracies: Sequence[float], at_epoch: int) -> float:
    """Extrapolate the accuracies of the first epochs to epoch ``at_epoch`` (from 1); fewer than three give the best.

    Fits a log2(x + b) + c with a >= 0 by least squares (a and c linear, b from a grid).
    """
    reached = np.asarray(accuracies, dtype=np.float64)
    best = float(reached.max())
    if len(reached) < _CURVE_MIN_EPOCHS or at_epoch <= len(reached):
        return best
    epochs = np.arange(1, len(reached) + 1, dtype=np.float64)
    fits: list[tuple[float, float]] = []
    for shift in _CURVE_SHIFTS:
        basis = np.log2(epochs + shift)
        slope = max(float(np.cov(basis, reached, bias=True)[0, 1] / basis.var()), 0.0)
        offset = float(reached.mean() - slope * basis.mean())
        error = float(((slope * basis + offset - reached) ** 2).sum())
        fits.append((error, slope * float(np.log2(at_epoch + shift)) + offset))
    return min(1.0, max(best, min(fits, key=lambda fit: fit[0])[1]))


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

    def add(
        self, network: Network, parent: int, morphs: tuple[Morph, ...], point: Point | None = None, in_round: int = 1
    ) -> Individual:
        """Append a pending individual and return it."""
        number = len(self.individuals)
        made = Individual(id=number, network=network, parent=parent, morphs=morphs, point=point, round=in_round)
        self.individuals.append(made)
        return made


@dataclass(frozen=True)
class Searcher:
    """Proposes a random morph of a random possible parent; base of the other searchers, stateless except for caches."""

    kinds: tuple[MorphKind, ...] = MORPH_KINDS
    limits: MorphLimits = field(default_factory=MorphLimits)
    rounds: int = 1

    def propose(self, population: Population, number: int = 1) -> list[Individual]:
        """Add at most ``number`` networks, equal for equal populations; raises MorphError where none is possible."""
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


class _Grown(NamedTuple):
    network: Network
    parent: int
    morphs: tuple[Morph, ...]


@dataclass(frozen=True)
class BayesianSearch(Searcher):
    """Proposes the networks with the highest upper confidence bounds that a best-first tree search visits.

    The search accepts worse nodes by simulated annealing. Pending networks count with their expected value, so that
    parallel trials differ.
    """

    _table: DistanceTable = field(default_factory=DistanceTable, repr=False)

    def propose(self, population: Population, number: int = 1) -> list[Individual]:
        """Add the next networks; random ones where fewer than two were observed or none can be found."""
        if len(population.observed) >= 2 and (best := self._walk(population, number)):
            return [population.add(*one) for one in best]
        return super().propose(population, number)

    def _walk(self, population: Population, number: int) -> list[_Grown]:
        """Return the best networks on the way; none where no visited network allows a morph."""
        generator, observed = population.generator(), population.leaders(_FITTED, _FITTED)
        fitted = [*observed, *population.pending[-_FITTED:]]
        sketches = [sketch(one.network) for one in fitted]
        apart = self._table.of(sketches)
        values = np.array([one.value or 0.0 for one in observed])
        model = GaussianProcess.fitted(apart[: len(observed), : len(observed)], values).extended(apart)
        reference = Reference(sketches)

        def bound(distance: Vector) -> float:
            mean, deviation = model.predict(distance)
            return mean + _BETA * deviation

        parents = {one.id for one in population.parents}
        rows = zip(fitted, apart, strict=True)
        queue = [(-bound(row), one.id, _Grown(one.network, one.id, ())) for one, row in rows if one.id in parents]
        heapq.heapify(queue)
        order = count(len(population.individuals))
        highest, temperature = -queue[0][0], 1.0
        candidates: dict[tuple[bytes, bytes], tuple[_Grown, Sketch, Vector]] = {}
        while queue and temperature > _END_TEMPERATURE:
            value, _, node = heapq.heappop(queue)
            unit = model.deviation * temperature
            temperature *= _COOLING
            if exp(min(0.0, (-value - highest) / unit)) < generator.random():
                continue
            choices = MorphChoices(node.network, self.limits)
            for _ in range(_CHILDREN):
                try:
                    morph, child = choices.draw(generator, self.kinds)
                except MorphError:
                    break
                drawn = sketch(child)
                distance = reference.distances(drawn)
                reached = bound(distance)
                grown_one = _Grown(child, node.parent, (*node.morphs, morph))
                heapq.heappush(queue, (-reached, next(order), grown_one))
                highest = max(highest, reached)
                candidates.setdefault(drawn.key, (grown_one, drawn, distance))
        if not candidates:
            return []
        nodes, drawn_ones, crosses = zip(*candidates.values(), strict=True)
        mutual = np.zeros((len(nodes), len(nodes)))  # not needed for one
        if number > 1:
            among = Reference(drawn_ones)
            mutual = np.array([among.distances(one) for one in drawn_ones])
        return [nodes[row] for row in model.select(np.array(crosses), mutual, number, _BETA)]


def _stages(network: Network) -> list[Shape]:
    """Return height and width of the main chain's convolutions between two poolings or strides, from the image on."""
    shapes = infer_shapes(network)
    return list(dict.fromkeys(shapes[name][1:] for name in main_chain(network) if name in network.convolutions))


def space(network: Network) -> dict[str, int]:
    """Return the largest value of what is searched: for each stage doublings of its filters, and added layers."""
    names = [f"{height}x{width}" for height, width in _stages(network)]
    return {f"double {name}": _MOST_DOUBLINGS for name in names} | {f"deepen {name}": _MOST_ADDED for name in names}


def grown(
    network: Network, point: Point, limits: MorphLimits, generator: np.random.Generator
) -> tuple[Network, tuple[Morph, ...]]:
    """Return the network at a point of its space, and the morphs to it; raises MorphError above the limits."""
    morphs: list[Morph] = []

    def choices(kind: Literal["widen", "deepen"], stage: Shape) -> list[Morph]:
        shapes = infer_shapes(network)
        return [morph for morph in MorphChoices(network, limits).of(kind) if shapes[morph.at][1:] == stage]

    def make(chosen: Morph) -> None:
        nonlocal network
        morph, network = MorphChoices(network, limits).make(chosen, generator)
        morphs.append(morph)

    for stage in _stages(network):
        height, width = stage
        for _ in range(point[f"double {height}x{width}"]):
            doubled: set[str] = set()
            while wider := [one for one in choices("widen", stage) if one.at not in doubled]:
                doubled |= set(channel_groups(network)[wider[0].at])
                make(wider[0])
        for _ in range(point[f"deepen {height}x{width}"]):
            for chosen in choices("deepen", stage)[-1:]:
                make(chosen)
    if not limits.allow(network):
        raise MorphError(f"{network.name!r} exceeds the limits at {dict(point)}")
    return network, tuple(morphs)


class BatchSearch(Searcher):
    """Tries every point of the space, one after the other; every network is grown from the seed."""

    def _next(self, population: Population) -> Individual:
        seed, generator = population.individuals[0].network, population.generator()
        known = [one.point for one in population.individuals]
        for point in self._points(population, generator):
            if point not in known:
                with suppress(MorphError):
                    network, morphs = grown(seed, point, self.limits, generator)
                    return population.add(network, 0, morphs, point=point)
        raise MorphError("no further point of the space is within the limits")

    def _points(self, population: Population, generator: np.random.Generator) -> Iterator[Point]:
        """Yield points in the order in which they are tried."""
        ranges = {name: range(most + 1) for name, most in space(population.individuals[0].network).items()}
        yield from (dict(zip(ranges, point, strict=True)) for point in product(*ranges.values()))


class TpeSearch(BatchSearch):
    """Draws points by Optuna's TPE, to which networks in training count as bad.

    The first ones double all filters once, twice and three times, with and without a layer more in the last stage.
    Where limits bound networks, the largest is the first.
    """

    def _points(self, population: Population, generator: np.random.Generator) -> Iterator[Point]:
        searched = space(population.individuals[0].network)
        is_bounded = self.limits.max_parameters or self.limits.max_forward_operations
        for doublings in range(1, _MOST_DOUBLINGS + 1)[:: -1 if is_bounded else 1]:
            wider = {name: doublings if name.startswith("double") else 0 for name in searched}
            yield from ({**wider, [*wider][-1]: 1}, wider)
        tried = [*population.leaders(_HISTORY, _HISTORY), *population.pending[-_HISTORY:]]
        known = [(dict(one.point), one.value) for one in tried if one.point is not None]
        yield from self._suggested(searched, known, int(generator.integers(2**31)))

    def _suggested(self, searched: Point, known: Sequence[Tried], seed: int) -> Iterator[Point]:
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

    def _suggested(self, searched: Point, known: Sequence[Tried], seed: int) -> Iterator[Point]:
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

    def _suggested(self, searched: Point, known: Sequence[Tried], seed: int) -> Iterator[Point]:
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
            for one in sorted(ended, key=lambda one: one.rank, reverse=True)[: len(ended) // _REDUCTION]:
                if one.id not in promoted:
                    return population.add(one.network, one.id, (), point=one.point, in_round=number + 1)
        return super()._next(population)


SEARCHERS: Final[Mapping[SearchName, type[Searcher]]] = {
    "bayesian": BayesianSearch, "random": Searcher, "evolution": EvolutionSearch, "tpe": TpeSearch,
    "anneal": AnnealSearch, "smac": SmacSearch, "batch": BatchSearch, "halving": HalvingSearch, "none": NoSearch,
}  # fmt: skip
