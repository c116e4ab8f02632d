"""MLPerf's samples of BERT in HDF5 or TFRecord, as its scripts write them, and the initial checkpoint of PyTorch.

The directory is FlagPerf's (``2048_shards_uncompressed``, ``eval_set_uncompressed``), that of NVIDIA's later
submissions (``hdf5``, ``phase1``), or one with ``tfrecord/part-*`` and ``tfrecord/eval_*``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.datasets.prepare.weights import check_weights, read_weights
from accelmark.datasets.shards import PACKAGE, features, integers, opened, records
from accelmark.spec.errors import DataError, RequestError, raising
from accelmark.spec.plugins.requirements import require

_RECORDS: Final = "tfrecord"
_SPLITS: Final = {
    "train": (
        "2048_shards_uncompressed",
        "hdf5/training-4320/hdf5_4320_shards_varlength",
        "hdf5/training-4320/hdf5_4320_shards_uncompressed",
        "hdf5/training_4320/hdf5_4320_shards_varlength",
        "hdf5/training_4320/hdf5_4320_shards_uncompressed",
        _RECORDS,
    ),
    "val": ("eval_set_uncompressed", "hdf5/eval_varlength", "hdf5/eval", _RECORDS),
}
"""Split -> directories that may have it; the first that exists is used."""
_CHECKPOINTS: Final = ("model.ckpt-28252.pt", "phase1/model.ckpt-28252.pt")
_COLUMNS: Final = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_UNUSED: Final = ("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder.", "bert.embeddings.position_ids")
"""Weights of the prediction of the next sentence, those that are tied to others, and no weights."""
_OF_WORDS: Final = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
_INNER: Final = "bert.encoder.layer.0.intermediate.dense.weight"
_VOCABULARY: Final = 30522


def _chosen(names: tuple[str, ...], what: str, archives: Archives) -> Path:
    if chosen := [archives.paths[name] for name in names if name in archives.paths]:
        return chosen[0]
    raise RequestError(f"{what}: none of {', '.join(names)} is in the directory")


def _write_split(split: str, archives: Archives, folder: Path) -> None:
    """Link the files of HDF5, or write one for each of TFRecord."""
    source = _chosen(_SPLITS[split], split, archives)
    is_converted = source.name == _RECORDS
    pattern = {"train": "part-*", "val": "eval_*"}[split] if is_converted else "*.hdf5"
    files = sorted(source.glob(pattern))
    if not files:
        raise DataError(f"{source}: has no {pattern}")
    if is_converted:
        require(str(source), PACKAGE)
    for file in files:
        target = folder / f"{file.stem}.hdf5"
        if not is_converted:
            archives.link(file, target)
        elif not target.exists():
            _convert(file, target)


def _convert(source: Path, target: Path) -> None:
    """Write the samples of a file of TFRecord to HDF5."""
    import h5py

    expected = f"expected integers {', '.join(_COLUMNS)}, as many in each sample"
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    with opened(source) as content:
        for row, place in enumerate(records(source, content, verify=True)):
            with raising(DataError, f"{source}: record {row}: {expected}", KeyError, ValueError):
                found = features(content, place)
                for name, rows in columns.items():
                    rows.append(integers(content, found[name]).astype(np.uint16))
    unfinished = target.with_suffix(".part")
    with h5py.File(unfinished, "w") as file, raising(DataError, f"{source}: {expected}", ValueError):
        for name, rows in columns.items():
            file[name] = np.stack(rows)
    unfinished.rename(target)


def _write_checkpoint(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` with the names of transformers."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertForMaskedLM

    path = _chosen(_CHECKPOINTS, "the initial checkpoint", archives)
    stored = read_weights(path)
    found = {
        # MLPerf's scripts pad the vocabulary to a multiple of eight.
        name.replace(".dense_act.", ".dense."): value[:_VOCABULARY] if name in _OF_WORDS else value
        for name, value in stored.get("model", stored).items()
        if not name.startswith(_UNUSED)
    }
    layers = {name.split(".")[3] for name in found if name.startswith("bert.encoder.layer.")}
    width, inner = (getattr(found.get(name), "shape", (1, 1)) for name in (_OF_WORDS[0], _INNER))
    sizes: dict[str, Any] = {"hidden_size": width[1], "intermediate_size": inner[0], "num_hidden_layers": len(layers)}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=1)).state_dict()
    expected = {name: value for name, value in model.items() if not name.startswith(_UNUSED)}
    check_weights(path, found, expected, "BERT")
    save_file({name: value.float().contiguous() for name, value in found.items()}, folder / "model.safetensors")


def _count(to: Path) -> str:
    import h5py

    counts = dict.fromkeys(_SPLITS, 0)
    for split in counts:
        for path in (to / split).glob("*.hdf5"):
            with h5py.File(path) as file:
                counts[split] += len(file["input_ids"])
    return ", ".join(f"{count:,} samples in {split}" for split, count in counts.items())


_NAMES: Final = dict.fromkeys((*_SPLITS["train"], *_SPLITS["val"], *_CHECKPOINTS))
PREPARATION: Final = Preparation(
    archives=[Archive(name, None, needed=False) for name in _NAMES],
    parts={
        **{split: Part((), partial(_write_split, split)) for split in _SPLITS},
        "initial": Part((), _write_checkpoint),
    },
    requires=("accelmark[torch]", "accelmark[models]", "h5py>=3.10"),
    count=_count,
)
