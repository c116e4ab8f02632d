"""Pack images in class folders into shards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final, Literal

from accelmark.datasets.prepare.preparation import naming_failed_writes
from accelmark.datasets.shards import PACKAGE, write_tar, write_tfrecord
from accelmark.datasets.spec import DatasetSpec, TreePart
from accelmark.datasets.verify import Progress, ProgressMeter, verify
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.plugins.requirements import require

IMAGES_PER_SHARD: Final = 1250
"""About 140 MB of ImageNet."""
_SEED: Final = 0
Format = Literal["webdataset", "tfrecord"]


def pack(
    spec: DatasetSpec,
    source: Path,
    to: Path,
    *,
    shard_format: Format = "webdataset",
    allow_subset: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the splits of ``source`` as shards below ``to``, and return the number of images.

    Their order is random and the same in every call, so that complete shards can be kept.
    """
    parts = [part for part in spec.tree if part.shards]
    if not parts:
        raise RequestError(f"{spec.name}: cases do not read it from shards")
    if shard_format == "tfrecord":
        require("TFRecord", PACKAGE)
    parts = [part for part in parts if (source / part.path).is_dir()] or parts
    unpacked = spec.model_copy(update={"tree": tuple(part.model_copy(update={"shards": False}) for part in parts)})
    if problems := verify(unpacked, source, allow_subset=allow_subset, progress=progress):
        raise DataError("\n  ".join([f"{spec.title} in {source} is not complete:", *map(str, problems)]))
    with naming_failed_writes(to):
        return sum(_pack_split(part, source, to, shard_format, progress) for part in parts)


def _pack_split(part: TreePart, source: Path, to: Path, shard_format: Format, progress: Progress | None) -> int:
    classes = sorted(path for path in (source / part.path).iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, folder in enumerate(classes)
        for path in sorted(folder.iterdir())
        if path.name.lower().endswith(part.suffixes)
    ]
    random.Random(_SEED).shuffle(files)
    meter = ProgressMeter(f"packing {part.path}", sum(path.stat().st_size for path, _ in files), progress)
    (to / part.path).mkdir(parents=True, exist_ok=True)
    for first in range(0, len(files), IMAGES_PER_SHARD):
        chosen = files[first : first + IMAGES_PER_SHARD]
        number = first // IMAGES_PER_SHARD
        name = f"{number:06}.tar"
        if shard_format == "tfrecord":
            name = f"{part.path}-{number:05}-of-{-(-len(files) // IMAGES_PER_SHARD):05}"
        if not (shard := to / part.path / name).exists():
            (write_tfrecord if shard_format == "tfrecord" else write_tar)(shard, chosen)
        meter.add(sum(path.stat().st_size for path, _ in chosen))
    return len(files)
