"""Pack images in class folders into WebDataset's shards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import naming_failed_writes
from accelmark.datasets.shards import write_shard
from accelmark.datasets.spec import DatasetSpec, TreePart
from accelmark.datasets.verify import Progress, ProgressMeter, verify
from accelmark.spec.errors import DataError, RequestError

IMAGES_PER_SHARD: Final = 1250
"""About 140 MB of ImageNet."""
_SEED: Final = 0


def pack(
    spec: DatasetSpec, source: Path, to: Path, *, allow_subset: bool = False, progress: Progress | None = None
) -> int:
    """Write the splits of ``source`` as shards below ``to``, and return the number of images.

    Their order is random and the same in every call, so that complete shards can be kept.

    Raises:
        RequestError: no case reads shards of this data set.
        DataError: ``source`` is not complete, or a shard cannot be written.
    """
    parts = [part for part in spec.tree if part.shards]
    if not parts:
        raise RequestError(f"{spec.name}: cases do not read it from shards")
    parts = [part for part in parts if (source / part.path).is_dir()] or parts
    unpacked = spec.model_copy(update={"tree": tuple(part.model_copy(update={"shards": False}) for part in parts)})
    if problems := verify(unpacked, source, allow_subset=allow_subset, progress=progress):
        raise DataError("\n  ".join([f"{spec.title} in {source} is not complete:", *map(str, problems)]))
    with naming_failed_writes(to):
        return sum(_pack_split(part, source, to, progress) for part in parts)


def _pack_split(part: TreePart, source: Path, to: Path, progress: Progress | None) -> int:
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
        shard = to / part.path / f"{first // IMAGES_PER_SHARD:06}.tar"
        if not shard.exists():
            write_shard(shard, chosen)
        meter.add(sum(path.stat().st_size for path, _ in chosen))
    return len(files)
