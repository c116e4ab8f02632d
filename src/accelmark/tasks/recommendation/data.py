"""Logs of clicks in the format of MLPerf's multi-hot Criteo data, read in consecutive parts."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.train.batches import Arrays

_LABELS: Final = "_labels.npy"
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""Lengths of name and extra field in the header that a ZIP archive has before each member."""


@final
class ClickLog:
    """The samples of all days in a directory, in the order of the days' numbers, memory-mapped.

    A day has ``<day>_labels.npy`` of shape (samples, 1), ``<day>_dense.npy`` of shape (samples, dense features), and
    ``<day>_sparse_multi_hot.npz``, not compressed, with the ids of each table: ``0.npy`` of shape (samples, ids).
    Tables have ``rows`` each, and ``num_ids`` in a sample; ``share`` is the first part of the last day that is used.
    """

    def __init__(
        self, directory: Path, num_dense: int, rows: Sequence[int], num_ids: Sequence[int], share: float = 1.0
    ) -> None:
        labels = sorted(directory.glob(f"*{_LABELS}"), key=_day)
        if not labels:
            raise DataError(f"{directory}: expected <day>{_LABELS} here, found none")
        self._paths = [path.with_name(path.name.removesuffix(_LABELS) + "_sparse_multi_hot.npz") for path in labels]
        self._days = [_opened(path, num_dense, num_ids) for path in labels]
        sizes = [len(day[0]) for day in self._days]
        sizes[-1] = math.ceil(sizes[-1] * share)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._limits = np.repeat(rows, num_ids)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Arrays:
        """Return ``dense``, ``ids`` and ``label`` of the samples from ``start`` to before ``stop``."""
        parts = []
        for number, (first, end) in enumerate(zip_strict(self._starts[:-1], self._starts[1:])):
            chosen = slice(max(start, first) - first, min(stop, end) - first)
            if max(start, first) < min(stop, end):
                label, dense, *tables = self._days[number]
                ids = np.concatenate([table[chosen] for table in tables], 1)
                outside = (ids < 0) | (ids >= self._limits)
                if outside.any():
                    row, column = np.argwhere(outside)[0].tolist()
                    problem = f"id {ids[row, column]} in column {column} of all tables' ids is outside of its table"
                    raise DataError(f"{self._paths[number]}: sample {chosen.start + row}: {problem}")
                parts.append((np.array(dense[chosen], np.float32), ids, label[chosen, 0].astype(np.float32)))
        joined = [np.concatenate(each) for each in zip_strict(*parts)]
        return dict(zip_strict(("dense", "ids", "label"), joined))


def _day(path: Path) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, path.name)) or 0), path.name


def _opened(labels: Path, num_dense: int, num_ids: Sequence[int]) -> list[Any]:
    """Return labels, dense features and the ids of each table of a day, memory-mapped."""
    stem = labels.name.removesuffix(_LABELS)
    archive = labels.with_name(f"{stem}_sparse_multi_hot.npz")
    files: list[tuple[Path, str | None, int]] = [
        (labels, None, 1),
        (labels.with_name(f"{stem}_dense.npy"), None, num_dense),
    ]
    files += [(archive, f"{number}.npy", width) for number, width in enumerate(num_ids)]
    arrays = [_mapped(path, member) for path, member, _ in files]
    for (path, member, width), array in zip_strict(files, arrays):
        if array.shape != (len(arrays[0]), width):
            expected = f"expected {(len(arrays[0]), width)}, as many samples as in {labels.name}"
            raise DataError(f"{path}: {member or 'it'} has shape {array.shape}; {expected}")
    return arrays


def _mapped(path: Path, member: str | None) -> npt.NDArray[Any]:
    """Return the array of a file, or of a member of an archive that is not compressed."""
    with raising(DataError, f"{path}: {member or 'it'} cannot be read", *UNREADABLE, zipfile.BadZipFile):
        if member is None:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            info = archive.getinfo(member)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed; write it with numpy.savez")
            file.seek(info.header_offset)
            name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            file.seek(info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra))
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def area_under_curve(scored: npt.NDArray[np.float64]) -> float:
    """Return the area under the ROC curve: the chance that a positive sample has a higher score than a negative one.

    ``scored`` has a row of score and label (0 or 1) for each sample; of equal scores, half counts.
    """
    positive = scored[:, 1] > 0
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise DataError(
            f"the evaluation data has {num_positive} clicks in {len(scored)} samples; AUC needs both labels"
        )
    ordered, scores = np.sort(scored[:, 0]), np.sort(scored[positive, 0])
    below, up_to = (np.searchsorted(ordered, scores, side) for side in ("left", "right"))
    ranks = (below.sum() + up_to.sum() + num_positive) / 2 - num_positive * (num_positive + 1) / 2
    return float(ranks / (num_positive * num_negative))
