"""Token shards: token numbers in flat files, memory-mapped and read in windows, which may be masked; bytes of plays.

The layout is ``<directory>/train/*`` and ``<directory>/val/*``, each file either ``.npy`` (one dimension, an unsigned
or signed integer type) or ``.bin``: the data of an indexed data set of Megatron-LM if an ``.idx`` of the same name is
beside it, else bare little-endian uint16. A window is always within one file.
"""

from __future__ import annotations

import bisect
import os
import sys
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from accelmark.datasets.shards import indexed_tokens
from accelmark.spec.errors import DataError, raising
from accelmark.spec.plugins.requirements import require
from accelmark.tasks.metrics import IGNORED
from accelmark.train.batches import Arrays, ArraySource


class TokenShards:
    """Windows of ``length`` tokens of a split, ``stride`` apart; only the first ``limit`` of them if that is given."""

    def __init__(
        self, directory: Path, split: str, length: int, stride: int, vocab_size: int, limit: int | None = None
    ) -> None:
        folder = directory / split
        paths = sorted(path for path in folder.glob("*") if path.suffix in {".npy", ".bin"}) if folder.is_dir() else []
        if not paths:
            found = ", ".join(sorted(path.name for path in directory.glob("*"))[:8]) or "nothing"
            raise DataError(f"{folder}: expected token shards (*.npy or *.bin) here; {directory} holds {found}")
        self._paths, self._length, self._stride, self._vocab_size = paths, length, stride, vocab_size
        self._shards = [_open(path) for path in paths]
        counts = [max(0, (len(shard) - length) // stride + 1) for shard in self._shards]
        self._ends = list(accumulate(counts))
        if not self._ends[-1]:
            raise DataError(f"{folder}: no shard holds {length} tokens, so there is not one sample")
        if limit is not None and limit > self._ends[-1]:
            raise DataError(f"{folder}: holds {self._ends[-1]} samples of {length} tokens; {limit} are needed")
        self._num_samples = self._ends[-1] if limit is None else limit

    def __len__(self) -> int:
        return self._num_samples

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return window ``index`` as int64 tokens of shape ``(length,)``."""
        which = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[which - 1] if which else 0)) * self._stride
        tokens: npt.NDArray[np.int64] = self._shards[which][start : start + self._length].astype(np.int64)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{self._paths[which]}: tokens {start} to {start + self._length} hold {int(tokens.max())}; "
                f"the vocabulary has {self._vocab_size}: was another tokenizer used?"
            )
        return tokens

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return window ``index`` as ``tokens``, as a source of samples; ``random`` is not used."""
        return {"tokens": self.window(index)}


def _open(path: Path) -> npt.NDArray[Any]:
    if path.suffix == ".bin":
        if (index := path.with_suffix(".idx")).is_file():
            kind, num_bytes = indexed_tokens(path, index)
            return np.memmap(path, kind, "r") if num_bytes else np.zeros(0, kind)
        if path.stat().st_size % 2:
            raise DataError(f"{path}: an odd number of bytes cannot be uint16 tokens; is the file complete?")
        return np.memmap(path, dtype="<u2", mode="r") if path.stat().st_size else np.zeros(0, np.uint16)
    with raising(DataError, f"{path}: is not a complete .npy file", ValueError, EOFError):
        shard: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if shard.ndim != 1 or shard.dtype.kind not in "iu":
        raise DataError(f"{path}: expected one dimension of integers, found {shard.dtype} of shape {shard.shape}")
    return shard


def only_file(folder: Path, pattern: str) -> Path:
    """Return the only file of a pattern; raises DataError where there is none, or another one."""
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise DataError(f"{folder}: expected one file {pattern}, found {len(paths)}")
    return paths[0]


CLS: Final = 101
SEP: Final = 102
MASK: Final = 103
"""Token ids of ``bert-large-uncased``'s vocabulary; 0 is padding."""
_SPECIAL: Final = (0, CLS, SEP, MASK)
_MASKED_SHARE: Final = 0.15


class MaskedWindows:
    """``[CLS] window [SEP]`` with 15 % of the window's tokens to predict, at most ``max_predictions`` of them.

    Of those, 80 % are replaced by ``[MASK]``, 10 % by a random token, and 10 % are unchanged (Devlin et al. 2018,
    arXiv:1810.04805, section 3.1).
    """

    def __init__(self, shards: TokenShards, max_predictions: int, vocab_size: int) -> None:
        self._shards, self._max_predictions, self._vocab_size = shards, max_predictions, vocab_size

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return ``tokens`` (length,), and ``positions`` and ``labels`` (predictions,), padded with ignored entries."""
        tokens = np.concatenate(([CLS], self._shards.window(index), [SEP]))
        candidates = np.flatnonzero(np.isin(tokens, _SPECIAL, invert=True))
        wanted = min(self._max_predictions, max(1, round(len(tokens) * _MASKED_SHARE)), len(candidates))
        chosen = np.sort(random.choice(candidates, wanted, replace=False))
        truth = tokens[chosen]
        fate = random.random(wanted)
        guess = random.integers(len(_SPECIAL), self._vocab_size, wanted)
        tokens[chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, guess, truth))
        spare = (0, self._max_predictions - wanted)
        labels = np.pad(truth, spare, constant_values=IGNORED)
        return {"tokens": tokens, "positions": np.pad(chosen, spare), "labels": labels}


class MaskedSamples:
    """Samples of MLPerf's BERT in ``*.hdf5``, which were masked when the files were written.

    Rows are padded to ``length`` tokens, with the number of tokens in ``input_mask``, or have variable lengths. Of the
    masked tokens, position 0 is padding.
    """

    def __init__(self, folder: Path, length: int, max_predictions: int, vocab_size: int) -> None:
        require(f"{folder}/*.hdf5", "h5py>=3.10")
        self._paths = sorted(folder.glob("*.hdf5"))
        self._length, self._max_predictions, self._vocab_size = length, max_predictions, vocab_size
        self._ends = list(accumulate(map(_num_samples, self._paths)))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return ``tokens`` and ``segments`` (length,), their ``num_tokens``, and ``positions`` and ``labels``."""
        which = bisect.bisect_right(self._ends, index)
        row, path = index - (self._ends[which - 1] if which else 0), self._paths[which]
        with raising(DataError, f"{path}: sample {row} cannot be read", OSError):
            file = _hdf5(path, os.getpid())
            tokens, segments, positions, labels = (file[name][row].astype(np.int64) for name in _COLUMNS)
            num_tokens = int(file["input_mask"][row].sum()) if "input_mask" in file else len(tokens)
        num_masked = int(np.count_nonzero(positions))
        length = max(len(tokens), int(positions.max(initial=0)) + 1)
        most = int(max(tokens.max(), labels.max(initial=0)))
        if length > self._length or num_masked > self._max_predictions or most >= self._vocab_size:
            has = f"has {len(tokens)} tokens up to {most}, {num_masked} of them masked"
            limits = f"{self._length} below {self._vocab_size}, {self._max_predictions} masked"
            raise DataError(f"{path}: sample {row} {has}; expected at most {limits}")
        rest, spare = (0, self._length - len(tokens)), (0, self._max_predictions - num_masked)
        return {
            "tokens": np.pad(tokens, rest),
            "segments": np.pad(segments, rest),
            "num_tokens": np.array(num_tokens),
            "positions": np.pad(positions[:num_masked], spare),
            "labels": np.pad(labels[:num_masked], spare, constant_values=IGNORED),
        }


_COLUMNS: Final = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_MOST_OPEN: Final = 128


@lru_cache(_MOST_OPEN)
def _hdf5(path: Path, process: int) -> Any:
    """Open a file of HDF5 in a process; a handle is not shared with another one."""
    import h5py

    sys.audit("open", str(path), "r", 0)  # the library opens it itself
    return h5py.File(path)


def _num_samples(path: Path) -> int:
    import h5py

    with raising(DataError, f"{path}: is not a complete HDF5 file", OSError), h5py.File(path) as file:
        counts = {name: len(file[name]) if name in file else None for name in _COLUMNS}
    if None in counts.values() or len(set(counts.values())) != 1:
        raise DataError(f"{path}: expected equally many rows of {', '.join(_COLUMNS)}; found {counts}")
    return counts["input_ids"] or 0


def masked_tokens(directory: Path, split: str, length: int, max_predictions: int, vocab_size: int) -> ArraySource:
    """Return samples that are masked anew in each epoch, or in ``*.hdf5`` were masked before; raises DataError."""
    if any((directory / split).glob("*.hdf5")):
        return MaskedSamples(directory / split, length, max_predictions, vocab_size)
    shards = TokenShards(directory, split, length - 2, length - 2, vocab_size)
    return MaskedWindows(shards, max_predictions, vocab_size)


BYTE_VALUES: Final = 256
HELD_OUT: Final = ("macbeth", "richard-ii", "twelfth-night")
"""Plays held out from training: a tragedy, a history, a comedy."""


def read_plays(directory: Path, *, held_out: bool) -> npt.NDArray[np.uint8]:
    """Return the concatenated bytes of the plays in ``HELD_OUT`` or of all others.

    Raises DataError: there are no plays, or a held-out one is missing.
    """
    plays = {path.stem: path for path in directory.rglob("*.md")}
    missing = [name for name in HELD_OUT if name not in plays]
    if missing:
        raise DataError(f"{directory}: expected the plays as *.md here; {', '.join(missing)} not found")
    chosen = [plays[name] for name in sorted(plays) if (name in HELD_OUT) == held_out]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in chosen), np.uint8)


def read_windows(directory: Path, length: int, count: int | None) -> npt.NDArray[np.uint8]:
    """Return windows of ``length + 1`` bytes of the training plays, or ``count`` of the held-out plays, spread evenly.

    Each window starts at the last byte of the one before. Shape (windows, length + 1).
    """
    plays = read_plays(directory, held_out=count is not None)
    windows = np.lib.stride_tricks.sliding_window_view(plays, length + 1)[::length]
    if count is not None:
        windows = windows[np.linspace(0, len(windows) - 1, count).astype(int)]
    return np.ascontiguousarray(windows)
