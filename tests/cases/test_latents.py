"""Shards of captioned latents: read by offset, and refused by name where they are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cases.tiny_data import npy, tar

pa = pytest.importorskip("pyarrow")
pytest.importorskip("diffusers")
from accelmark.tasks.generation.pytorch import CaptionedLatents, EncodedRows  # noqa: E402

SHAPE = 8, 2, 2


def test_samples_of_all_shards_are_read_in_order(tmp_path: Path) -> None:
    one, two = (npy(np.full(SHAPE, value, np.float16)) for value in (1, 2))
    tar(tmp_path / "00001.tar", {"7.txt": b"two dogs\n", "7.npy": two})
    tar(tmp_path / "00000.tar", {"a/3.npy": one, "a/3.txt": b"a cat", "a/3.json": b"{}"})
    latents = CaptionedLatents(tmp_path)
    found = [latents.read(index, SHAPE) for index in range(len(latents))]
    assert [(float(array.mean()), caption) for array, caption in found] == [(1, "a cat"), (2, "two dogs")]


ENCODED = {"mean": (2, 4, 4), "clip_encodings": (3,)}


def rows(folder: Path, **changed: object) -> Path:
    arrays = {name: np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) for name, shape in ENCODED.items()}
    row = {name: npy(array) for name, array in arrays.items()} | {"timestep": 3} | changed
    for number in (1, 2):
        table = pa.Table.from_pylist([{name: value for name, value in row.items() if value is not None}] * number)
        with pa.ipc.new_stream(str(folder / f"data-{number}.arrow"), table.schema) as stream:
            stream.write_table(table)
    return folder


def test_rows_of_several_arrow_files_are_read_by_their_number(tmp_path: Path) -> None:
    found = EncodedRows(rows(tmp_path), ENCODED, ("timestep",))
    assert len(found) == 3
    if Path("/proc/self/fd").is_dir():
        assert not any(each.resolve().suffix == ".arrow" for each in Path("/proc/self/fd").iterdir())
    for index in range(3):
        row = found.read(index)
        assert row["mean"].shape == (2, 4, 4)
        assert row["clip_encodings"].tolist() == [0, 1, 2]
        assert row["timestep"] == 3
