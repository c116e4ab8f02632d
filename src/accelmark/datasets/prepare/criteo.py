"""Criteo's click logs of 24 days with lists of ids, as MLPerf makes them from one id of each table."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import load_case

_SEED: Final = 0
_BLOCK: Final = 1 << 20
"""Rows that are drawn, and ids that are written, at a time; the drawn numbers depend on it."""
_SUMS: Final = Path(__file__).with_suffix(".md5")
"""From https://github.com/facebookresearch/dlrm, torchrec_dlrm/md5sums_preprocessed_criteo_click_logs_dataset.txt."""
_DAYS: Final = [f"day_{number}" for number in range(24)]


def _write(days: Sequence[str], archives: Archives, folder: Path) -> None:
    """Write labels, dense features and lists of ids of the days that are there."""
    lists = _id_lists(*_sizes())
    for day in (day for day in days if f"{day}_sparse.npy" in archives.paths):
        for kind in ("labels", "dense"):
            archives.place(f"{day}_{kind}.npy", folder)
        target = folder / f"{day}_sparse_multi_hot.npz"
        if target.exists():
            continue
        part = folder / f".{target.name}.part"
        ids = np.load(archives.paths[f"{day}_sparse.npy"], mmap_mode="r", allow_pickle=False)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for number, table in enumerate(lists):
                with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                    header = {"descr": "<i4", "fortran_order": False, "shape": (len(ids), table.shape[1])}
                    np.lib.format.write_array_header_1_0(file, header)
                    for start in range(0, len(ids), _BLOCK):
                        file.write(table[ids[start : start + _BLOCK, number] % len(table)].astype("<i4").tobytes())
        part.replace(target)


def _sizes() -> tuple[list[int], list[int]]:
    """Return the numbers of rows and of ids of each table of the case."""
    train = load_case("dlrm_dcnv2").train
    assert train is not None  # noqa: S101 - it has a training side
    model: Any = train.settings["model"]
    rows, ids = ([int(part) for part in str(model[name]).split(",")] for name in ("table_rows", "table_ids"))
    return rows, ids


def _id_lists(rows: Sequence[int], num_ids: Sequence[int]) -> Sequence[npt.NDArray[np.int32]]:
    """Draw MLPerf's lists for each table, (rows, ids): each begins with its id, the others are uniform over the table.

    Raises RequestError: they do not fit into the memory that is free.
    """
    needed, free = 4 * sum(np.multiply(rows, num_ids).tolist()), psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free"
        raise RequestError(f"the lists of ids need {sizes}")
    random = np.random.RandomState(_SEED)
    lists = []
    for count, width in zip(rows, num_ids, strict=True):
        table = np.empty((count, width), np.int32)
        table[:, 0] = np.arange(count)
        for start in range(0, count, _BLOCK):
            part = table[start : start + _BLOCK, 1:]
            part[:] = random.randint(0, count, size=part.shape)
        lists.append(table)
    return lists


PREPARATION: Final = Preparation(
    archives=[Archive(name, md5) for md5, name in map(str.split, _SUMS.read_text(encoding="ascii").splitlines())],
    parts={"train": Part((), partial(_write, _DAYS[:-1])), "val": Part((), partial(_write, _DAYS[-1:]))},
    unpacked_ratio=5.7,
)
