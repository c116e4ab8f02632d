from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from accelmark.spec.errors import DataError
from accelmark.tasks.language.data import TokenShards


def write(path: Path, tokens: npt.NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.astype("<u2").tobytes())


def test_windows_run_through_all_shards_and_cross_none(tmp_path: Path) -> None:
    write(tmp_path / "train/a.bin", np.arange(9))
    write(tmp_path / "train/b.npy", np.arange(3, dtype=np.uint16))
    write(tmp_path / "train/c.npy", np.arange(100, 105, dtype=np.int32))
    shards = TokenShards(tmp_path, "train", length=5, stride=4, vocab_size=200)
    windows = [shards.window(index).tolist() for index in range(len(shards))]
    assert windows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [100, 101, 102, 103, 104]]


def test_both_file_kinds_read_the_same(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 65536, 50)
    write(tmp_path / "bin/train/x.bin", tokens)
    write(tmp_path / "npy/train/x.npy", tokens.astype(np.uint16))
    read = [TokenShards(tmp_path / kind, "train", 50, 50, 65536).window(0).tolist() for kind in ("bin", "npy")]
    assert read[0] == read[1] == tokens.tolist()


def indexed(folder: Path, tokens: list[int], kind: int, dtype: str) -> Path:
    """Write an indexed data set of Megatron-LM with two sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    np.array(tokens, dtype).tofile(folder / "text_document.bin")
    lengths = np.array([3, len(tokens) - 3], "<i4")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, kind, 2, 3)
    rest = np.array([0, 3 * np.dtype(dtype).itemsize], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
    (folder / "text_document.idx").write_bytes(head + lengths.tobytes() + rest)
    return folder / "text_document.bin"


@pytest.mark.parametrize(("kind", "dtype"), [(4, "<i4"), (8, "<u2")])
def test_an_indexed_data_set_of_megatron_is_read_in_its_type(tmp_path: Path, kind: int, dtype: str) -> None:
    indexed(tmp_path / "train", list(range(30000, 30010)), kind, dtype)
    shards = TokenShards(tmp_path, "train", 4, 3, 128_256)
    assert [shards.window(index).tolist() for index in range(len(shards))] == [
        [30000 + start + offset for offset in range(4)] for start in (0, 3, 6)
    ]


def test_only_the_first_windows_are_read_where_a_limit_is_given(tmp_path: Path) -> None:
    indexed(tmp_path / "val", list(range(20)), 4, "<i4")
    assert len(TokenShards(tmp_path, "val", 4, 4, 100, limit=3)) == 3
    with pytest.raises(DataError, match="holds 5 samples of 4 tokens; 6 are needed"):
        TokenShards(tmp_path, "val", 4, 4, 100, limit=6)
