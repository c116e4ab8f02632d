"""The edit distance between networks: over the layers of the main chain, and over the skips that leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from accelmark.automl.graph import Convolution, Dense, Layer, MaxPool, Network, main_chain, skips
from accelmark.automl.graph.layers import AveragePool

Vector = NDArray[np.float64]

_KINDS: Final = {"convolution": 0.0, "dense": 1.0, "max_pool": 2.0, "average_pool": 3.0}
_WIDTH_COST: Final = 0.25
_KERNEL_COST: Final = 0.125
SKIP_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a distance looks at: a row (kind, log2 width, kernel, stride) a layer, and the skips."""

    layers: Vector
    skips: Vector
    """One row (start, end, 1 where it is a concat) a skip."""


def _row(layer: Layer) -> tuple[float, float, float, float] | None:
    match layer:
        case Convolution():
            return (_KINDS[layer.kind], np.log2(layer.filters), layer.kernel, layer.stride)
        case Dense():
            return (_KINDS[layer.kind], np.log2(layer.units), 1.0, 1.0)
        case MaxPool() | AveragePool():
            return (_KINDS[layer.kind], 0.0, layer.kernel, layer.stride)
        case _:
            return None


def sketch(network: Network) -> Sketch:
    """Reduce a network to what the distance looks at: layers with weights, pools, and skips."""
    rows = [_row(network.by_name[name].layer) for name in main_chain(network)]
    table = np.array([row for row in rows if row is not None], dtype=np.float64).reshape(-1, 4)
    rows_of_skips = [(skip.start, skip.end, float(skip.merge == "concat")) for skip in skips(network)]
    return Sketch(table, np.array(rows_of_skips, dtype=np.float64).reshape(-1, 3))


def distances(one: Sketch, others: Sequence[Sketch]) -> Vector:
    """Return the distance of one network to each of ``others``: 0 for itself, symmetric.

    Inserting or removing a layer costs 1; changing one costs a quarter per doubling of its width and an
    eighth per pixel of its kernel, at most 1; changing its kind or stride costs 1. Skips are paired for the
    least total cost.
    """
    if not others:
        return np.zeros(0)
    layers = _layer_distances(one.layers, [other.layers for other in others])
    return layers + SKIP_WEIGHT * np.array([_skip_distance(one.skips, other.skips) for other in others])


def _layer_distances(rows: Vector, others: Sequence[Vector]) -> Vector:
    """Levenshtein distances by dynamic programming, one row at a time, all of ``others`` at once."""
    lengths = np.array([len(other) for other in others])
    padded = np.full((len(others), int(lengths.max()), rows.shape[1]), -1.0)
    for index, other in enumerate(others):
        padded[index, : len(other)] = other
    columns = np.arange(padded.shape[1] + 1, dtype=np.float64)
    table = np.broadcast_to(columns, (len(others), columns.size)).copy()
    for number, row in enumerate(rows, start=1):
        change = np.minimum(
            1.0,
            _WIDTH_COST * np.abs(padded[:, :, 1] - row[1]) + _KERNEL_COST * np.abs(padded[:, :, 2] - row[2]),
        )
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
