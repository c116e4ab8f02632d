"""Predict accuracies, which guide the search: a Gaussian process over edit distances, and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import linear_sum_assignment

from accelmark.automl.model.graph import AveragePool, Convolution, Dense, MaxPool, Network, main_chain, skips

Vector = NDArray[np.float64]

_WIDTH_COST: Final = 0.25
_KERNEL_COST: Final = 0.125
_SKIP_WEIGHT: Final = 0.5
_SCALES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_NOISES: Final = (1e-3, 1e-2, 1e-1, 3e-1)
_CURVE_SHIFTS: Final = np.geomspace(0.05, 200.0, 60)
_CURVE_MIN_EPOCHS: Final = 3


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
            case Convolution(filters=filters) as layer:
                rows.append((0, np.log2(filters), layer.kernel, layer.stride))
            case Dense(units=units):
                rows.append((1, np.log2(units), 1, 1))
            case MaxPool() | AveragePool() as layer:
                rows.append((2 if isinstance(layer, MaxPool) else 3, 0, layer.kernel, layer.stride))
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
