"""Checkpoints as NumPy arrays, for frameworks that keep the same state on every rank."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import RunError
from accelmark.spec.log.events import UpdateSquares
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory, ExchangeMax, name_of, reading
from accelmark.train.loop.contract import Progress

NamedArrays = Mapping[str, npt.NDArray[Any]]


@final
class ArrayCheckpoints:
    """The checkpoints of a job: a directory each, written by the lowest of the ranks that share it."""

    def __init__(self, directory: Path, place: RankPlace, exchange_max: ExchangeMax) -> None:
        self._directory, self._place = CheckpointDirectory(directory, place, exchange_max), place

    def save(self, state: Callable[[], NamedArrays], progress: Progress, barrier: Callable[[], object]) -> str:
        """Write a checkpoint and return its name, when it is complete; all ranks call this.

        Args:
            state: returns the same arrays on every rank.
            barrier: returns when all ranks have called it.

        Raises RunError: it could not be written, for example because the disk is full.
        """
        name = name_of(progress.global_steps)
        temporary = self._directory.temporary(name)
        try:
            if self._directory.leader() == self._place.rank:
                self._write(temporary, state(), progress)
                self._directory.complete(name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"the checkpoint {temporary} could not be written: {error}") from error
        barrier()
        return name

    def _write(self, temporary: Path, arrays: NamedArrays, progress: Progress) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        np.savez(temporary / "state.npz", allow_pickle=False, **arrays)
        record = {"world_size": self._place.world_size, "writer": self._place.rank, "progress": asdict(progress)}
        (temporary / "progress.json").write_text(json.dumps(record), encoding="utf-8")

    def newest(self) -> Path | None:
        """Return the newest checkpoint that all hosts have, or None."""
        return self._directory.newest()

    def load(self, checkpoint: Path) -> tuple[dict[str, npt.NDArray[Any]], Progress]:
        """Return the arrays of a checkpoint and the progress of training.

        Raises RunError: it is damaged, or was written by another number of ranks.
        """
        with reading(checkpoint):
            record = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
            with np.load(checkpoint / "state.npz", allow_pickle=False) as stored:
                arrays = dict(stored)
        if record["world_size"] != self._place.world_size:
            raise RunError(
                f"the checkpoint {checkpoint} has world_size {record['world_size']}, this job "
                f"{self._place.world_size}; use the same, or train again"
            )
        return arrays, Progress(**record["progress"])


def update_squares(before: NamedArrays, replayed: NamedArrays, saved: NamedArrays) -> UpdateSquares:
    """Compare the change of the parameters by replayed steps with that by training, in double precision."""
    squares = [0.0, 0.0, 0.0]
    for name, array in before.items():
        start = array.astype(np.float64)
        changes = (replayed[name] - start, saved[name] - start)
        for index, change in enumerate((*changes, changes[0] - changes[1])):
            squares[index] += float(np.square(change).sum())
    return UpdateSquares(replayed=squares[0], saved=squares[1], difference=squares[2])


def structure_hash(arrays: NamedArrays) -> str:
    """SHA-256 over names, shapes and types of all parameters, in order of their names."""
    return hashlib.sha256("".join(_line(name, array) for name, array in sorted(arrays.items())).encode()).hexdigest()


def weights_hash(arrays: NamedArrays) -> str:
    """SHA-256 over names, shapes, types and values of all parameters, in order of their names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(_line(name, array).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _line(name: str, array: npt.NDArray[Any]) -> str:
    return f"{name} {array.shape} {array.dtype}\n"
