"""Predict accuracies: a Gaussian process over edit distances of networks, and extrapolation of learning curves.

Predictions guide the search and are not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import linear_sum_assignment

from accelmark.automl.model.layers import AveragePool, Convolution, Dense, MaxPool
from accelmark.automl.model.network import Network, main_chain, skips

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
    """The features that the distance compares; hashed by identity."""

    layers: Vector
    """A row (kind, log2 width, kernel, stride) per convolution, dense layer and pooling of the main chain."""
    skips: Vector
    """A row (start, end, 1 for concat) per skip."""


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


def distances(one: Sketch, others: Sequence[Sketch]) -> Vector:
    """Return the edit distance of one network to each of ``others``: symmetric, 0 to itself.

    Inserting or removing a layer costs 1; changing one costs 1/4 per doubling of its width and 1/8 per pixel of its
    kernel, at most 1; changing its kind or stride costs 1. Skips are paired for the least total cost.
    """
    if not others:
        return np.zeros(0)
    layers = _layer_distances(one.layers, [other.layers for other in others])
    return layers + _SKIP_WEIGHT * np.array([_skip_distance(one.skips, other.skips) for other in others])


def _layer_distances(rows: Vector, others: Sequence[Vector]) -> Vector:
    """Levenshtein distances by dynamic programming, one row at a time, for all ``others`` at once."""
    lengths = np.array([len(other) for other in others])
    padded = np.full((len(others), int(lengths.max()), rows.shape[1]), -1.0)
    for index, other in enumerate(others):
        padded[index, : len(other)] = other
    columns = np.arange(padded.shape[1] + 1, dtype=np.float64)
    table = np.broadcast_to(columns, (len(others), columns.size)).copy()
    for number, row in enumerate(rows, start=1):
        width, kernel = (np.abs(padded[:, :, axis] - row[axis]) for axis in (1, 2))
        change = np.minimum(1.0, _WIDTH_COST * width + _KERNEL_COST * kernel)
        change = np.where((padded[:, :, 0] == row[0]) & (padded[:, :, 3] == row[3]), change, 1.0)
        best = np.empty_like(table)
        best[:, 0] = number
        best[:, 1:] = np.minimum(table[:, 1:] + 1.0, table[:, :-1] + change)
        table = np.minimum.accumulate(best - columns, axis=1) + columns  # insertions, each costing 1
    result: Vector = table[np.arange(len(others)), lengths]
    return result


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


def _rbf(distance: Vector, scale: float) -> Any:
    return np.exp(-0.5 * (distance / scale) ** 2)


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """A posterior over values, fitted to the mutual distances of observed networks.

    Values are standardized; length scale and noise maximize the marginal likelihood over a small grid.
    """

    scale: float
    mean: float
    deviation: float
    _factor: tuple[Vector, bool]
    _solved: Vector

    @staticmethod
    def fitted(distance: Vector, values: Vector) -> GaussianProcess:
        """Fit to ``values`` (n,) of networks with mutual distances ``distance`` (n, n)."""
        mean, deviation = float(values.mean()), float(values.std())
        deviation = deviation if deviation > 1e-9 else 1.0
        scaled = (values - mean) / deviation
        apart = distance[distance > 0]
        typical = float(np.median(apart)) if apart.size else 1.0
        fits: list[tuple[float, GaussianProcess]] = []
        for scale in (typical * factor for factor in _SCALES):
            # Without negative eigenvalues: an edit distance need not give a valid kernel.
            kernel = _rbf(distance, scale)
            eigenvalues, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
            kernel = (vectors * np.maximum(eigenvalues, 0.0)) @ vectors.T
            for noise in _NOISES:
                factor = cho_factor(kernel + (noise + 1e-10) * np.eye(len(values)), lower=True)
                solved = cho_solve(factor, scaled)
                likelihood = -0.5 * float(scaled @ solved) - float(np.log(np.diag(factor[0])).sum())
                fits.append((likelihood, GaussianProcess(scale, mean, deviation, factor, solved)))
        return max(fits, key=lambda fit: fit[0])[1]

    def predict(self, distance: Vector) -> tuple[float, float]:
        """Return mean and standard deviation of a network's value from its distances to the fitted networks."""
        cross = _rbf(distance, self.scale)
        mean = float(cross @ self._solved)
        variance = 1.0 - float(cross @ cho_solve(self._factor, cross))
        return self.mean + self.deviation * mean, self.deviation * float(np.sqrt(max(variance, 0.0)))


def predicted_accuracy(accuracies: Sequence[float], at_epoch: int) -> float:
    """Extrapolate the accuracies of the first epochs to epoch ``at_epoch`` (from 1).

    Fits a log2(x + b) + c with a >= 0 by least squares (a and c linear, b from a grid). The result lies between the
    best accuracy reached and 1; with fewer than three epochs it is the best accuracy reached.
    """
    if not accuracies:
        raise ValueError("a learning curve needs at least one epoch")
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
