"""Shards of captioned latents: read by offset, and refused by name where they are damaged."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from accelmark.spec.errors import DataError
from accelmark.train.tasks.generation.latents import CaptionedLatents

SHAPE = 8, 2, 2


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.float16]]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def shard(folder: Path, files: Mapping[str, bytes]) -> CaptionedLatents:
    with tarfile.open(folder / "00000.tar", "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return CaptionedLatents(folder)


def test_samples_of_all_shards_are_read_in_order(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "00001.tar", "w") as archive:
        for name, content in (("7.txt", b"two dogs\n"), ("7.npy", npy(np.full(SHAPE, 2, np.float16)))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    latents = shard(tmp_path, {"a/3.npy": npy(np.ones(SHAPE, np.float16)), "a/3.txt": b"a cat", "a/3.json": b"{}"})
    found = [latents.read(index, SHAPE) for index in range(len(latents))]
    assert [(float(array.mean()), caption) for array, caption in found] == [(1, "a cat"), (2, "two dogs")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"3.npy": npy(np.ones((4, 2, 2), np.float16)), "3.txt": b"x"}, r"shape \(4, 2, 2\) of float16; expected"),
        ({"3.npy": npy(np.full(SHAPE, np.nan, np.float16)), "3.txt": b"x"}, r"expected finite moments"),
        ({"3.npy": b"no array", "3.txt": b"x"}, r"00000.tar: sample at byte 512: cannot be read"),
        ({"3.npy": npy(np.ones(SHAPE, np.float16))}, r"00000.tar: has no 3.txt"),
    ],
)
def test_a_damaged_sample_is_named(tmp_path: Path, files: Mapping[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard(tmp_path, files).read(0, SHAPE)


def test_a_directory_without_shards_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}: expected shards \(\*.tar\)"):
        CaptionedLatents(tmp_path)
    (tmp_path / "0.tar").write_bytes(b"x" * 700)
    with pytest.raises(DataError, match=r"0.tar: is not a readable tar archive"):
        CaptionedLatents(tmp_path)
