"""Shards of labelled images, in which an image is read by its offset, and of tokens.

Those of images are WebDataset's and TFRecord, those of tokens are indexed data sets of Megatron-LM.

WebDataset's are tar archives ``*.tar`` with ``<key>.jpg`` (or .jpeg, .png), and the class in ``<key>.cls``.
TFRecord's are ``<split>-00000-of-01024`` with ``image/encoded``, ``image/filename`` and ``image/class/label`` from 1,
as TensorFlow's ``build_imagenet_data.py`` writes them.

A record of TFRecord is its length (uint64), a checksum of the length (uint32), the message, and a checksum of the
message. The messages are those of TensorFlow's ``example.proto`` and ``feature.proto``; TensorFlow is not needed.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Union

from accelmark.spec.errors import DataError, raising

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PACKAGE: Final = "google-crc32c>=1.5"
"""Computes checksums, which are written, and verified where a file is converted."""
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")
_END: Final = 0x80
"""From this value on, a byte of a number is followed by another one."""
Span = tuple[int, int]
"""First byte, and the byte after the last one."""
Buffer = Union[mmap, bytes]


def opened(path: Path) -> mmap:
    """Map a file into memory, so that only what is read of it is loaded; raises DataError where it is empty."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path}: is empty")
        return mmap(file.fileno(), 0, access=ACCESS_READ)


def records(path: Path, content: Buffer, *, verify: bool = False) -> Iterator[Span]:
    """Yield the place of each message; ``verify`` compares the checksums. Raises DataError for a damaged file."""
    begin = 0
    while begin < len(content):
        body = begin + _HEADER.size
        size, checksum = _HEADER.unpack_from(content, begin) if body <= len(content) else (len(content), 0)
        end = body + size
        if end + _CHECKSUM.size > len(content):
            raise DataError(f"{path}: no complete record of TFRecord at byte {begin:,}; copy the file again")
        if verify and (checksum, *_CHECKSUM.unpack_from(content, end)) != (
            _masked_crc(content[begin : begin + 8]),
            _masked_crc(content[body:end]),
        ):
            raise DataError(f"{path}: the record at byte {begin:,} does not match its checksum; copy the file again")
        yield body, end
        begin = end + _CHECKSUM.size


def _masked_crc(content: bytes) -> int:
    """Return the CRC-32C of bytes, rotated and with a constant added (``tsl/lib/hash/crc32c.h``)."""
    from google_crc32c import value

    crc: int = value(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def features(content: Buffer, record: Span) -> dict[str, Span]:
    """Return the place of each feature of an Example: its single bytes value, or its packed numbers.

    Raises ValueError: it is another message.
    """
    ((_, whole),) = _fields(content, record)
    named = {}
    for _, entry in _fields(content, whole):
        (_, name), (_, feature) = _fields(content, entry)
        ((_, values),) = _fields(content, feature)
        named[content[slice(*name)].decode()] = next(_fields(content, values), (0, (0, 0)))[1]
    return named


def integers(content: Buffer, place: Span) -> npt.NDArray[np.int64]:
    """Return packed integers."""
    import numpy as np

    packed = np.frombuffer(content[slice(*place)], np.uint8)
    first = np.flatnonzero(np.concatenate(([True], packed[:-1] < _END))) if len(packed) else np.zeros(0, np.intp)
    shift = 7 * (np.arange(len(packed)) - np.repeat(first, np.diff([*first, len(packed)])))
    parts = (packed % _END).astype(np.int64) << shift
    return np.bitwise_or.reduceat(parts, first) if len(packed) else parts


def _fields(content: Buffer, place: Span) -> Iterator[tuple[int, Span]]:
    """Yield number and place of each field of a message; all fields of an Example have a length."""
    begin, end = place
    while begin < end:
        key, begin = _number(content, begin)
        size, begin = _number(content, begin)
        if key % 8 != 2 or begin + size > end:
            raise ValueError("is no tf.train.Example")
        yield key // 8, (begin, begin + size)
        begin += size


def _number(content: Buffer, place: int) -> tuple[int, int]:
    """Return a number, and the byte after it."""
    value = 0
    for index, byte in enumerate(content[place : place + 10]):
        value |= (byte % _END) << 7 * index
        if byte < _END:
            return value, place + index + 1
    raise ValueError("is no tf.train.Example")


def write_records(path: Path, examples: Iterable[Mapping[str, bytes | int]]) -> None:
    """Write Examples, each with bytes and integers by name, under another name, and rename the complete file."""
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        for example in examples:
            content = _message(1, b"".join(_entry(name, value) for name, value in example.items()))
            size = len(content).to_bytes(8, "little")
            file.write(size + _CHECKSUM.pack(_masked_crc(size)) + content + _CHECKSUM.pack(_masked_crc(content)))
    unfinished.replace(path)


def _entry(name: str, value: bytes | int) -> bytes:
    """Return a feature: field 1 of its list of bytes (1) or of integers (3)."""
    values = _message(1, value) if isinstance(value, bytes) else _message(1, _packed(value))
    feature = _message(1 if isinstance(value, bytes) else 3, values)
    return _message(1, _message(1, name.encode()) + _message(2, feature))


def _message(field: int, content: bytes) -> bytes:
    return bytes([8 * field + 2]) + _packed(len(content)) + content


def _packed(value: int) -> bytes:
    return bytes([value]) if value < _END else bytes([value % _END + _END]) + _packed(value // _END)


IMAGE_SUFFIXES: Final = (".jpeg", ".jpg", ".png")
_PIXELS, _NAME, _CLASS = "image/encoded", "image/filename", "image/class/label"


class TarMember(NamedTuple):
    """A file in a tar archive."""

    name: str
    offset: int
    size: int


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


_BLOCK: Final = 512
_TAR_HEADER: Final = struct.Struct("100s24x12s12x8s1s188x155s12x")
"""Name, size, checksum, type, and the part of the name before a slash."""
_EXTENDED: Final = (b"path=", b"size=", b"sparse")
"""Of an extended header, what changes name or size of the next member."""


def tar_members(path: Path) -> Sequence[TarMember]:
    """Return the files in a tar archive that is not compressed; raises DataError where it is damaged."""
    with raising(DataError, f"{path}: is not a readable tar archive", tarfile.TarError, OSError, EOFError):
        if plain := _plain_members(path):
            return plain
        with tarfile.open(path, "r:") as archive:
            return [TarMember(each.name, each.offset_data, each.size) for each in archive if each.isreg()]


def _plain_members(path: Path) -> Sequence[TarMember]:
    """Return the files of an undamaged archive of short names and sizes, in a quarter of tarfile's time; else none."""
    members, place = [], 0
    with opened(path) as content:
        while any(header := content[place : place + _BLOCK]):
            if len(header) < _BLOCK:
                return []
            name, size, checksum, kind, prefix = (part.partition(b"\0")[0] for part in _TAR_HEADER.unpack(header))
            first = place + _BLOCK
            try:
                is_sound = int(checksum, 8) == sum(header) - sum(header[148:156]) + 8 * ord(" ")
                end = first + int(size, 8)
            except ValueError:
                return []
            if not is_sound or end > len(content) or kind not in (b"0", b"5", b"x"):
                return []
            if kind == b"x" and any(sign in content[first:end] for sign in _EXTENDED):
                return []
            if kind == b"0":
                full = (prefix + b"/" if prefix else b"") + name
                members.append(TarMember(full.decode("utf-8", "surrogateescape"), first, end - first))
            place = -(-end // _BLOCK) * _BLOCK
    return members


def _tar_images(shard: Path) -> Iterator[ShardImage]:
    images: dict[str, TarMember] = {}
    labels: dict[str, int] = {}
    with shard.open("rb") as file:
        for member in tar_members(shard):
            key, _, suffix = member.name.rpartition(".")
            if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                images[key] = member
            elif suffix == "cls":
                text = bytes_at(file, member.offset, member.size).decode("ascii", "replace").strip()
                if not text.isdecimal():
                    raise DataError(f"{shard}: {member.name} has {text!r}; expected the number of a class")
                labels[key] = int(text)
    if unpaired := sorted(images.keys() ^ labels.keys()):
        lacks = "class (.cls)" if unpaired[0] in images else "image"
        raise DataError(f"{shard}: {unpaired[0]} has no {lacks}")
    for key, member in images.items():
        yield ShardImage(*member, labels[key])


def _record_images(shard: Path) -> Iterator[ShardImage]:
    with opened(shard) as content:
        for number, record in enumerate(records(shard, content)):
            what = f"{shard}: record {number} is no tf.train.Example with {_PIXELS} and one {_CLASS}"
            with raising(DataError, what, ValueError, KeyError):
                found = features(content, record)
                (label,) = integers(content, found[_CLASS])
                begin, end = found[_PIXELS]
                name = content[slice(*found[_NAME])].decode() if _NAME in found else f"image {number}"
            yield ShardImage(name, begin, end - begin, int(label) - 1)


def bytes_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Return a part of a file."""
    file.seek(offset)
    return file.read(size)


_MAGIC: Final = b"MMIDIDX\x00\x00"
_INDEX: Final = struct.Struct("<9sQBQQ")
"""Magic, version, type of the tokens, number of sequences and of documents.

The sequences' lengths (int32) and first bytes (int64) follow.
"""
_TOKEN_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Type numbers of Megatron-LM's ``megatron/core/datasets/indexed_dataset.py``; 6 and 7 are not integers."""


def indexed_tokens(path: Path, index: Path) -> tuple[str, int]:
    """Return NumPy's type and the number of bytes of the tokens in ``path``; raises DataError where the index differs.

    The end of the last sequence is read, since hundreds of millions of lengths take gigabytes.
    """
    with index.open("rb") as file:
        header = file.read(_INDEX.size)
        if len(header) < _INDEX.size or header[: len(_MAGIC)] != _MAGIC:
            raise DataError(f"{index}: is not an index of Megatron-LM; remove it if {path.name} holds bare uint16")
        _, version, kind, count, _ = _INDEX.unpack(header)
        if version != 1 or kind not in _TOKEN_TYPES:
            raise DataError(f"{index}: has version {version} and type {kind}; expected version 1 and integers")
        places = ((_INDEX.size + 4 * (count - 1), 4), (_INDEX.size + 4 * count + 8 * (count - 1), 8))
        length, first = (int.from_bytes(bytes_at(file, *place), "little") if count else 0 for place in places)
    num_bytes = first + length * int(_TOKEN_TYPES[kind][-1])
    if (actual := path.stat().st_size) != num_bytes:
        raise DataError(f"{path}: has {actual:,} bytes, {index.name} expects {num_bytes:,}; is the file complete?")
    return _TOKEN_TYPES[kind], num_bytes


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
        shard, ({_PIXELS: path.read_bytes(), _NAME: path.name.encode(), _CLASS: label + 1} for path, label in images)
    )
