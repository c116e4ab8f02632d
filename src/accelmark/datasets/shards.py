"""Shards of labelled images, in which an image is read by its offset: WebDataset's and TFRecord.

WebDataset's are tar archives ``*.tar`` with ``<key>.jpg`` (or .jpeg, .png), and the class in ``<key>.cls``.
TFRecord's are ``<split>-00000-of-01024`` with ``image/encoded``, ``image/filename`` and ``image/class/label`` from 1,
as TensorFlow's ``build_imagenet_data.py`` writes them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Final, NamedTuple

from accelmark.datasets.tfrecord import features, integers, opened, records, write_records
from accelmark.spec.errors import DataError

_SUFFIXES: Final = (".jpeg", ".jpg", ".png")
_PIXELS, _NAME, _CLASS = "image/encoded", "image/filename", "image/class/label"


class ShardImage(NamedTuple):
    """An image in a shard."""

    name: str
    offset: int
    size: int
    label: int


def shards_in(directory: Path) -> Sequence[Path]:
    """Return the shards of one split in order."""
    return sorted(directory.glob("*.tar")) or sorted(directory.glob("*-[0-9]*-of-[0-9]*"))


def shard_images(shard: Path) -> Iterator[ShardImage]:
    """Yield the images of a shard; raises DataError where it is damaged, or an image has no class."""
    return (_tar_images if shard.suffix == ".tar" else _record_images)(shard)


def _tar_images(shard: Path) -> Iterator[ShardImage]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in filter(tarfile.TarInfo.isreg, archive):
                key, _, suffix = member.name.rpartition(".")
                if f".{suffix.lower()}" in _SUFFIXES:
                    images[key] = member
                elif suffix == "cls" and (content := archive.extractfile(member)) is not None:
                    text = content.read().decode("ascii", "replace").strip()
                    if not text.isdecimal():
                        raise DataError(f"{shard}: {member.name} has {text!r}; expected the number of a class")
                    labels[key] = int(text)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{shard}: is not a readable tar archive: {error}") from error
    if unpaired := sorted(images.keys() ^ labels.keys()):
        lacks = "class (.cls)" if unpaired[0] in images else "image"
        raise DataError(f"{shard}: {unpaired[0]} has no {lacks}")
    for key, member in images.items():
        yield ShardImage(member.name, member.offset_data, member.size, labels[key])


def _record_images(shard: Path) -> Iterator[ShardImage]:
    with opened(shard) as content:
        for number, record in enumerate(records(shard, content)):
            try:
                found = features(content, record)
                (label,) = integers(content, found[_CLASS])
                begin, end = found[_PIXELS]
                name = content[slice(*found[_NAME])].decode() if _NAME in found else f"image {number}"
            except (ValueError, KeyError) as error:
                what = f"{_PIXELS} and one {_CLASS}"
                raise DataError(f"{shard}: record {number} is no tf.train.Example with {what}: {error}") from error
            yield ShardImage(name, begin, end - begin, int(label) - 1)


def bytes_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Return a part of a file."""
    file.seek(offset)
    return file.read(size)


def write_tar(shard: Path, images: Iterable[tuple[Path, int]]) -> None:
    """Write image files with their classes under another name, and rename the shard when it is complete."""
    unfinished = shard.with_name(f".{shard.name}.part")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path, label in images:
            image = f"{path.stem}{path.suffix.lower().replace('.jpeg', '.jpg')}"
            for name, content in ((image, path.read_bytes()), (f"{path.stem}.cls", str(label).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, BytesIO(content))
    unfinished.replace(shard)


def write_tfrecord(shard: Path, images: Iterable[tuple[Path, int]]) -> None:
    """Write image files with their classes as :func:`write_tar` does, in TFRecord."""
    write_records(
        shard,
        ({_PIXELS: path.read_bytes(), _NAME: path.name.encode(), _CLASS: label + 1} for path, label in images),
    )
