"""Arrays and weights from their published files: BERT's samples and checkpoint, Criteo's click logs, ResNet-50-vd.

The directory of BERT is FlagPerf's (``2048_shards_uncompressed``, ``eval_set_uncompressed``), that of NVIDIA's later
submissions (``hdf5``, ``phase1``), or one with ``tfrecord/part-*`` and ``tfrecord/eval_*``.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.datasets.shards import PACKAGE, features, integers, opened, records
from accelmark.spec.errors import UNREADABLE, DataError, RequestError, raising
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.plugins.requirements import require

ARCHIVE: Final = "ResNet50_vd_ssld_v2_pretrained_from_paddle.pth"
_RESNET_NAMES: Final = {
    r"^conv1\.conv1_1\.": "embedder.embedder.0.",
    r"^conv1\.conv1_2\.": "embedder.embedder.1.",
    r"^conv1\.conv1_3\.": "embedder.embedder.2.",
    r"^res_layers\.": "encoder.stages.",
    r"\.blocks\.": ".layers.",
    r"\.branch2a\.": ".layer.0.",
    r"\.branch2b\.": ".layer.1.",
    r"\.branch2c\.": ".layer.2.",
    r"\.short\.conv\.(conv|norm)\.": r".shortcut.1.\1.",
    r"\.short\.": ".shortcut.",
    r"\.conv\.": ".convolution.",
    r"\.norm\.": ".normalization.",
}
"""Parts of the authors' names -> those of transformers, replaced in this order."""


def read_weights(path: Path) -> dict[str, Any]:
    """Return what a file of PyTorch has by name, without running code in it; raises DataError where it is damaged."""
    import torch

    unreadable = f"{path}: PyTorch cannot read it as weights alone; download it again"
    with raising(DataError, unreadable, *UNREADABLE, UnpicklingError):
        return dict(torch.load(path, weights_only=True, map_location="cpu"))


def check_weights(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], title: str) -> None:
    """Raise DataError where names or shapes of weights are not those of a model."""
    for name in sorted(expected.keys() | found.keys()):
        shapes = [tuple(getattr(each[name], "shape", ())) if name in each else None for each in (found, expected)]
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: has other weights than {title}: {name} of {shapes[0]}, expected {shapes[1]}")


def _write_resnet50_vd(archives: Archives, folder: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``; counters of steps, without meaning here, are left out."""
    import torch
    from safetensors.torch import save_file
    from transformers import RTDetrResNetBackbone, RTDetrResNetConfig

    path, config = archives.paths[ARCHIVE], RTDetrResNetConfig()
    with torch.device("meta"):
        model = RTDetrResNetBackbone(config).state_dict()
    expected, weights = (
        {name: value for name, value in weights.items() if not name.endswith(".num_batches_tracked")}
        for weights in (model, read_weights(path))
    )
    for part, other in _RESNET_NAMES.items():
        weights = {re.sub(part, other, name): value for name, value in weights.items()}
    check_weights(path, weights, expected, "ResNet-50-vd")
    config.save_pretrained(folder)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


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


_BLOCK: Final = 1 << 20
"""Rows that are drawn, and ids that are written, at a time; the drawn numbers depend on it."""
_SUMS: Final = Path(__file__).with_name("criteo.md5")
"""From https://github.com/facebookresearch/dlrm, torchrec_dlrm/md5sums_preprocessed_criteo_click_logs_dataset.txt."""
_DAYS: Final = [f"day_{number}" for number in range(24)]


def _write_days(days: Sequence[str], archives: Archives, folder: Path) -> None:
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
    random = np.random.RandomState(0)
    lists = []
    for count, width in zip(rows, num_ids, strict=True):
        table = np.empty((count, width), np.int32)
        table[:, 0] = np.arange(count)
        for start in range(0, count, _BLOCK):
            part = table[start : start + _BLOCK, 1:]
            part[:] = random.randint(0, count, size=part.shape)
        lists.append(table)
    return lists


PREPARATIONS: Final[Mapping[str, Preparation]] = {
    "bert_tokens": Preparation(
        archives=[
            Archive(name, None, needed=False)
            for name in dict.fromkeys((*_SPLITS["train"], *_SPLITS["val"], *_CHECKPOINTS))
        ],
        parts={
            **{split: Part((), partial(_write_split, split)) for split in _SPLITS},
            "initial": Part((), _write_checkpoint),
        },
        requires=("accelmark[torch]", "accelmark[models]", "h5py>=3.10"),
        count=_count,
    ),
    "criteo": Preparation(
        archives=[Archive(name, md5) for md5, name in map(str.split, _SUMS.read_text(encoding="ascii").splitlines())],
        parts={"train": Part((), partial(_write_days, _DAYS[:-1])), "val": Part((), partial(_write_days, _DAYS[-1:]))},
        unpacked_ratio=5.7,
    ),
    "resnet50_vd_weights": Preparation(
        archives=[Archive(ARCHIVE, None)],
        parts={"hf": Part((ARCHIVE,), _write_resnet50_vd)},
        requires=("accelmark[torch]", "accelmark[models]"),
    ),
}
