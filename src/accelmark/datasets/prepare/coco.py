"""COCO 2017 with boxes from its published archives."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Preparation, copied, write_whole
from accelmark.datasets.verify import ProgressMeter
from accelmark.spec.errors import DataError

IMAGES: Final = {"train2017.zip": "train2017", "val2017.zip": "val2017"}
ANNOTATIONS: Final = "annotations_trainval2017.zip"


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``annotations/instances_<split>.json`` and ``<split>/*.jpg``; complete files are kept."""
    names = {f"annotations/instances_{split}.json" for split in IMAGES.values()}
    _write(archives[ANNOTATIONS], names, to, meter)
    for archive, split in IMAGES.items():
        content = json.loads((to / "annotations" / f"instances_{split}.json").read_bytes())
        _write(archives[archive], {f"{split}/{image['file_name']}" for image in content["images"]}, to, meter)


def _write(path: Path, names: Collection[str], to: Path, meter: ProgressMeter) -> None:
    """Write members of an archive under their names, in its order."""
    with _opened_zip(path) as archive:
        members = [member for member in archive.infolist() if member.filename in names]
        if missing := sorted(set(names) - {member.filename for member in members}):
            raise DataError(f"{path}: has no {missing[0]}" + (f" and {len(missing) - 1} others" if missing[1:] else ""))
        for folder in {PurePosixPath(name).parent for name in names}:
            (to / folder).mkdir(parents=True, exist_ok=True)
        for member in members:
            if not (to / member.filename).exists():
                with archive.open(member) as stream:
                    write_whole(to / member.filename, copied(stream))
            meter.add(member.compress_size)


@contextmanager
def _opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: is not a readable zip archive: {error}; download it again") from error


PREPARATION: Final = Preparation(
    archives=(
        Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2"),
        Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80"),
        Archive(ANNOTATIONS, "f4bbac642086de4f52a3fdda2de5fa2c"),
    ),
    unpack=_unpack,
    unpacked_ratio=1.02,
)
