"""ReCoRD as FlagPerf's ``train_sparse.hdf5`` and ``eval_sparse.hdf5`` have it: matrices that h5sparse wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, final

import h5py
import numpy as np
from scipy.sparse import csr_matrix

from accelmark.spec.errors import DataError
from accelmark.tasks.metrics import IGNORED
from accelmark.train.batches import Arrays

_MATRICES: Final = ("text", "position", "mask", "target", "logit_mask", "choice_start_end")
_ANSWERS: Final = ("answer_start_end", "answer_idx")


@final
class Choices:
    """Queries, each with one sequence of ``length`` tokens for each choice.

    Row ``i`` of ``text``, ``target``, ``logit_mask`` and of ``mask`` is a choice; rows ``2 i`` and ``2 i + 1`` of
    ``position`` are its positions and block positions. ``target_length`` limits the tokens that are predicted.

    Raises:
        DataError: a matrix is missing or damaged.
    """

    def __init__(self, path: Path, length: int, target_length: int, num_choices: int | None) -> None:
        """``num_choices`` is the number of choices that each query is padded to; None: the largest in the file."""
        self._path, self._length, self._target_length = path, length, target_length
        with_answers = num_choices is None
        try:
            sys.audit("open", str(path), "r", 0)  # the library opens it itself
            with h5py.File(path) as file:
                names = (*_MATRICES, *(_ANSWERS if with_answers else ()))
                self._rows = {name: _matrix(file[name]) for name in names}
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path}: is not complete, or lacks a matrix of {', '.join(_MATRICES)}: {error}") from error
        self._places = self._rows["choice_start_end"].toarray()
        self._first_answers = self._rows["answer_start_end"].toarray() if with_answers else None
        if with_answers:
            self._answers = self._rows["answer_idx"].toarray().reshape(-1)
        self._separators = self._rows["mask"].toarray().reshape(-1)
        self._num_choices = num_choices or int((self._places[:, 1] - self._places[:, 0]).max())

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return the arrays of a query; the first dimension of all is the number of choices, spare ones are zeros.

        ``tokens`` and ``positions`` (choices, 2, length), ``separators``: the tokens before them see each other;
        ``places`` and ``targets`` (choices, target length) of predicted tokens; ``is_choice``, ``is_answer``.
        """
        begin, end = self._places[index]
        count = min(int(end - begin), self._num_choices)
        rows = slice(begin, begin + count)
        masks, targets = (self._rows[name][rows].toarray() for name in ("logit_mask", "target"))
        if int(masks.sum(1).max()) > self._target_length:
            most = f"{int(masks.sum(1).max())} tokens to predict; expected {self._target_length} at most"
            raise DataError(f"{self._path}: query {index} has {most}")
        sample = {
            "tokens": np.zeros((self._num_choices, self._length), np.int64),
            "positions": np.zeros((self._num_choices, 2, self._length), np.int64),
            "separators": np.zeros(self._num_choices, np.int64),
            "places": np.zeros((self._num_choices, self._target_length), np.int64),
            "targets": np.full((self._num_choices, self._target_length), IGNORED, np.int64),
            "is_choice": np.arange(self._num_choices) < count,
        }
        sample["tokens"][:count] = self._rows["text"][rows].toarray()
        positions = self._rows["position"][2 * begin : 2 * (begin + count)].toarray()
        sample["positions"][:count] = positions.reshape(count, 2, -1)
        sample["separators"][:count] = self._separators[rows]
        for row, (mask, target) in enumerate(zip(masks, targets)):
            chosen = np.flatnonzero(mask)
            sample["places"][row, : len(chosen)], sample["targets"][row, : len(chosen)] = chosen, target[chosen]
        if self._first_answers is not None:
            answers = self._answers[slice(*self._first_answers[index])]
            sample["is_answer"] = np.isin(np.arange(self._num_choices), answers)
        return sample


def _matrix(stored: Any) -> csr_matrix:
    """Return a matrix of a group with ``data``, ``indices`` and ``indptr``; rows that are not sparse are a data set."""
    if isinstance(stored, h5py.Dataset):
        return csr_matrix(np.atleast_2d(stored[()]))
    return csr_matrix((stored["data"][()], stored["indices"][()], stored["indptr"][()]), stored.attrs["h5sparse_shape"])
