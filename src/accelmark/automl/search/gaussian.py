"""A Gaussian process over distances: what a network may be worth, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Vector = NDArray[np.float64]

_SCALES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_NOISES: Final = (1e-3, 1e-2, 1e-1, 3e-1)


def rbf(distance: Vector, scale: float) -> Vector:
    """Return exp(-d^2 / (2 scale^2))."""
    result: Vector = np.exp(-0.5 * (distance / scale) ** 2)
    return result


def nearest_positive(kernel: Vector) -> Vector:
    """Return ``kernel`` without its negative eigenvalues: an edit distance need not give a valid kernel."""
    values, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
    result: Vector = (vectors * np.maximum(values, 0.0)) @ vectors.T
    return result


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """A posterior over values, fitted to distances between observed networks.

    Values are standardised inside; length scale and noise maximise the marginal likelihood over a small grid.
    """

    scale: float
    mean: float
    deviation: float
    _factor: tuple[Vector, bool]
    _solved: Vector

    @staticmethod
    def fitted(distance: Vector, values: Vector) -> GaussianProcess:
        """Fit to ``values`` (n,) of networks whose mutual distances are ``distance`` (n, n)."""
        mean, deviation = float(values.mean()), float(values.std())
        deviation = deviation if deviation > 1e-9 else 1.0
        scaled = (values - mean) / deviation
        apart = distance[distance > 0]
        typical = float(np.median(apart)) if apart.size else 1.0
        best: tuple[float, GaussianProcess] | None = None
        for scale in (typical * factor for factor in _SCALES):
            kernel = nearest_positive(rbf(distance, scale))
            for noise in _NOISES:
                factor = cho_factor(kernel + (noise + 1e-10) * np.eye(len(values)), lower=True)
                solved = cho_solve(factor, scaled)
                likelihood = -0.5 * float(scaled @ solved) - float(np.log(np.diag(factor[0])).sum())
                if best is None or likelihood > best[0]:
                    best = (likelihood, GaussianProcess(scale, mean, deviation, factor, solved))
        if best is None:
            raise ValueError("nothing to fit")
        return best[1]

    def predict(self, distance: Vector) -> tuple[float, float]:
        """Return mean and standard deviation of the value at the given distances from the observed."""
        cross = rbf(distance, self.scale)
        mean = float(cross @ self._solved)
        variance = 1.0 - float(cross @ cho_solve(self._factor, cross))
        return self.mean + self.deviation * mean, self.deviation * float(np.sqrt(max(variance, 0.0)))
