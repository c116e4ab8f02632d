"""C4 as tokens of Llama 3.1's vocabulary, as MLPerf Training publishes it: indexed data sets of Megatron-LM."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

SETS: Final = {
    "train": "c4-train.en_6_text_document",
    "val": "c4-validation-91205-samples.en_text_document",
}
"""Split -> name of its indexed data set."""
_HEADER: Final = struct.Struct("<9sQBQQ")
"""Magic bytes, version, code of the tokens' type, numbers of sequences and of documents.

The sequences' lengths (int32) follow, their places in the file (int64) and the first sequence of each document (int64).
"""
_MAGIC: Final = b"MMIDIDX\x00\x00"
_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Code of a type -> bytes of a token (``megatron/core/datasets/indexed_dataset.py``)."""


def _write(split: str, archives: Archives, folder: Path) -> None:
    """Link or copy a set, after its size is compared with its index."""
    index, tokens = (f"{SETS[split]}.{part}" for part in ("idx", "bin"))
    _check(archives.paths[index], archives.paths[tokens])
    archives.place(index, folder)
    archives.place(tokens, folder)


def _check(index: Path, tokens: Path) -> None:
    """Raise DataError where the tokens are not as many as the index says."""
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{index}: is not the index of a Megatron-LM data set; download it again")
        _, _, code, sequences, documents = _HEADER.unpack(header)
        lengths = np.fromfile(file, "<i4", sequences)
    if code not in _BYTES or index.stat().st_size < _HEADER.size + 12 * sequences + 8 * documents:
        raise DataError(f"{index}: is incomplete or has an unknown type of tokens ({code}); download it again")
    expected, actual = int(lengths.sum(dtype=np.int64)) * _BYTES[code], tokens.stat().st_size
    if expected != actual:
        raise DataError(f"{tokens}: has {actual:,} bytes, its index describes {expected:,}; download it again")


PREPARATION: Final = Preparation(
    archives=[Archive(f"{name}.{part}", None) for name in SETS.values() for part in ("idx", "bin")],
    parts={split: Part((f"{name}.idx", f"{name}.bin"), partial(_write, split)) for split, name in SETS.items()},
)
