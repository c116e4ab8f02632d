"""The weights of trained networks, kept in the run's folder as plain arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.automl.data.arrays import read_npz
from accelmark.automl.trial.order import Array
from accelmark.spec.errors import DataError

_KEPT: Final = 16


class WeightStore:
    """One .npz file an individual, as long as it may be asked for; the most recently used stay in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._kept: OrderedDict[int, dict[str, Array]] = OrderedDict()
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, individual: int, weights: dict[str, Array]) -> None:
        """Write an individual's weights beside and rename them into place."""
        target = self._path(individual)
        beside = target.with_suffix(".part.npz")
        np.savez(beside, **weights)  # type: ignore[arg-type]
        beside.replace(target)
        self._keep(individual, weights)

    def load(self, individual: int) -> dict[str, Array] | None:
        """Return an individual's weights, or None when it has none."""
        if individual in self._kept:
            self._kept.move_to_end(individual)
            return self._kept[individual]
        if not self._path(individual).is_file():
            return None
        weights = read_weights(self._path(individual))
        self._keep(individual, weights)
        return weights

    def keep_only(self, individuals: Collection[int]) -> None:
        """Remove the weights of all others, and what a killed process left half written."""
        for path in self._directory.glob("*.npz"):
            if not path.stem.isdecimal() or int(path.stem) not in individuals:
                path.unlink(missing_ok=True)
        for one in [known for known in self._kept if known not in individuals]:
            del self._kept[one]

    def _keep(self, individual: int, weights: dict[str, Array]) -> None:
        self._kept[individual] = weights
        self._kept.move_to_end(individual)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _path(self, individual: int) -> Path:
        return self._directory / f"{individual}.npz"


def read_weights(path: Path) -> dict[str, Array]:
    """Read arrays from an .npz file; raises DataError when it is missing or broken."""
    arrays = read_npz(path, "weights")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise DataError(f"{path}: cannot be read as weights: {name} holds {array.dtype}, not floats")
    return {name: array.astype(np.float32) for name, array in arrays.items()}
