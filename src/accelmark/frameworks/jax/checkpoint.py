"""Checkpoints of a JAX job: one ``.npz`` file of all arrays, and the progress of training.

They are written to a temporary directory and renamed: a killed process leaves complete ones only. All ranks hold
the same state, so rank 0 writes; with several hosts the directory has to be on a shared file system.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np

from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Progress

_NAME: Final = re.compile(r"^step(\d{9})$")


@final
class Checkpoints:
    """The checkpoints of a job in its directory; ``keep`` are kept."""

    def __init__(self, directory: Path, keep: int, place: RankPlace) -> None:
        self._directory, self._keep, self._place = directory, keep, place

    def save(self, state: Any, progress: Progress, *, final: bool) -> str:
        """Write a checkpoint (rank 0) and return its name; the ``final`` one is kept in addition to the others.

        Raises:
            RunError: it could not be written, for example because the disk is full.
        """
        name = f"step{progress.global_steps:09d}"
        if self._place.rank != 0:
            return name
        temporary = self._directory / f"{name}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            np.savez(temporary / "state.npz", allow_pickle=False, **to_arrays(state))
            record = {"world_size": self._place.world_size, "progress": asdict(progress)}
            (temporary / "progress.json").write_text(json.dumps(record), encoding="utf-8")
            shutil.rmtree(self._directory / name, ignore_errors=True)
            temporary.rename(self._directory / name)
            for old in self.names()[: -(self._keep + final)]:
                shutil.rmtree(self._directory / old)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"the checkpoint {temporary} could not be written: {error}") from error
        return name

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(path.name for path in self._directory.iterdir() if _NAME.match(path.name))

    def newest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        names = self.names()
        return self._directory / names[-1] if names else None

    def load(self, checkpoint: Path, state: Any) -> tuple[Any, Progress]:
        """Return the state of a checkpoint in the structure of ``state`` as NumPy arrays, and the progress of training.

        Raises:
            RunError: it is damaged, or was written by another number of ranks.
        """
        try:
            record = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
            with np.load(checkpoint / "state.npz", allow_pickle=False) as arrays:
                loaded = from_arrays(state, dict(arrays))
        except Exception as error:
            raise RunError(
                f"the checkpoint {checkpoint} cannot be read ({type(error).__name__}: {error}); "
                "remove it to continue from the one before it, or from the beginning"
            ) from error
        if record["world_size"] != self._place.world_size:
            raise RunError(
                f"the checkpoint {checkpoint} has world_size {record['world_size']}, this job "
                f"{self._place.world_size}; use the same, or train again"
            )
        progress = record["progress"]
        losses = {int(step): loss for step, loss in progress.pop("reference_losses").items()}
        return loaded, Progress(**progress, reference_losses=losses)


def to_arrays(state: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a nested state by their path, on the host; random keys as their data."""
    return {
        jax.tree_util.keystr(path): np.asarray(_data(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def from_arrays(state: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return ``state`` with the values of :func:`to_arrays`.

    Raises:
        KeyError: an array is missing.
        ValueError: an array has another shape.
    """

    def value(path: Any, leaf: Any) -> Any:
        array, expected = arrays[jax.tree_util.keystr(path)], _data(leaf)
        if array.shape != expected.shape:
            raise ValueError(f"{jax.tree_util.keystr(path)} has shape {array.shape}, not {expected.shape}")
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if expected is not leaf else array

    return jax.tree_util.tree_map_with_path(value, state)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
