"""Make a data set from its published archives, which are found and verified, or shards from its class folders."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

from accelmark.datasets.ensure import DAMAGE, ArchiveKind, archive_members
from accelmark.datasets.shards import PACKAGE, write_tar, write_tfrecord
from accelmark.datasets.spec import DatasetSpec, TreePart
from accelmark.datasets.verify import Progress, ProgressMeter, verify
from accelmark.spec.errors import DataError, RequestError, raising
from accelmark.spec.plugins.requirements import require

_CHUNK: Final = 1 << 20
IMAGES_PER_SHARD: Final = 1250
"""About 140 MB of ImageNet."""
Format = Literal["webdataset", "tfrecord"]


class Archive(NamedTuple):
    """A published file, or a directory of files."""

    name: str
    md5: str | None
    """As published; None where no hash is published."""
    needed: bool = True
    """Whether the data set cannot be prepared without it."""


class Archives:
    """The published files on this machine, by name. Reading their members reports the progress."""

    def __init__(self, paths: Mapping[str, Path], meter: ProgressMeter) -> None:
        self.paths: Final = paths
        self._meter = meter

    def members(self, name: str) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield name and content of each regular file in a tar or zip archive; raises DataError where it is damaged."""
        for member, size, content in files_in(self.paths[name]):
            self._meter.add(size)
            yield member, content

    def extract(self, name: str, targets: Mapping[str, Path]) -> None:
        """Write members to files, by their names or the last parts of these; files that exist are kept.

        Raises DataError where the archive lacks a member.
        """
        left = dict(targets)
        for member, stream in self.members(name):
            target = left.pop(member, None) or left.pop(member.rpartition("/")[2], None)
            if target is not None and not target.exists():
                write_whole(target, copied(stream))
            if not left:
                return
        more = f" and {len(left) - 1} others" if len(left) > 1 else ""
        raise DataError(f"{self.paths[name]}: has no {min(left)}{more}")

    def place(self, name: str, folder: Path) -> None:
        """Link a file that needs no unpacking into a folder, or copy it where the file system is another one."""
        self.link(self.paths[name], folder / name)

    def link(self, source: Path, target: Path) -> None:
        """Link a file, or copy it where the file system is another one; a file that exists is kept."""
        self._meter.add(source.stat().st_size)
        if target.exists():
            return
        try:
            os.link(source, target)
        except OSError:
            with source.open("rb") as stream:
                write_whole(target, copied(stream))


def files_in(path: Path, stream: IO[bytes] | None = None) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and content of the regular files of an archive, or of the tar archive ``stream`` in another."""
    kind: ArchiveKind = "zip" if path.suffix == ".zip" else "tar"
    with raising(DataError, f"{path}: is not a readable {kind} archive; download it again", *DAMAGE):
        for name, size, content in archive_members(kind, path, stream):
            if content is not None:
                yield name, size, content


class Part(NamedTuple):
    """A directory of a data set."""

    archives: Collection[str]
    """The archives that it is written from; it is left out where one of them is missing."""
    write: Callable[[Archives, Path], None]
    """Writes into the directory given, which may have files of an interrupted preparation and is next to the others."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a data set is made from its archives."""

    archives: Sequence[Archive]
    parts: Mapping[str, Part]
    """Directory -> how it is written, in this order."""
    unpacked_ratio: float = 1.0
    """Size of the prepared data set in relation to its archives, for the check of free space."""
    requires: Sequence[str] = ()
    """Packages that a part imports, as in ``requires`` of a case."""
    count: Callable[[Path], str] | None = None
    """Returns the number of samples in the prepared data set."""


def prepare(
    spec: DatasetSpec,
    preparation: Preparation,
    source: Path,
    to: Path,
    *,
    allow_subset: bool = False,
    progress: Progress | None = None,
) -> Mapping[str, Path]:
    """Write ``spec`` to ``to`` from the archives in the directory ``source``, and return the archives that were used.

    Archives are verified by their published MD5; a second call continues after the complete parts.

    Raises:
        RequestError: an archive or a package is missing, or there is too little space; nothing was written.
        DataError: an archive is damaged or another one, a file cannot be written, or the result is incomplete.
    """
    require(spec.name, *preparation.requires)
    paths = _located(spec, preparation.archives, source)
    files = (file for path in paths.values() for file in ([path] if path.is_file() else path.iterdir()))
    num_bytes = sum(file.stat().st_size for file in files)
    with naming_failed_writes(to):
        to.mkdir(parents=True, exist_ok=True)
        present = sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
        needed, free = preparation.unpacked_ratio * num_bytes - present, shutil.disk_usage(to).free
        if needed > free:
            problem = f"about {needed / 2**30:,.1f} GiB are needed, {free / 2**30:,.1f} GiB are free"
            raise RequestError(f"{to}: {problem}; name another directory with --to")
        _check_hashes(preparation.archives, paths, ProgressMeter("verifying archives", num_bytes, progress))
        archives = Archives(paths, ProgressMeter(f"unpacking {spec.name}", num_bytes, progress))
        for name, part in preparation.parts.items():
            if paths.keys() >= set(part.archives) and not (to / name).exists():
                with whole_directory(to / name) as folder:
                    part.write(archives, folder)
    written = [part for part in spec.tree if (to / part.path).is_dir()]
    made = spec.model_copy(update={"tree": tuple(written) or spec.tree})
    if problems := verify(made, to, allow_subset=allow_subset, progress=progress):
        raise DataError("\n  ".join([f"{spec.title} in {to} is not complete:", *map(str, problems)]))
    return paths


@contextmanager
def naming_failed_writes(to: Path) -> Iterator[None]:
    """Raise DataError for an error of the operating system, such as a full disk, with advice."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or to}: {error.strerror or error}"
        raise DataError(f"{problem}; solve it, and repeat the command: complete parts are kept") from error


def _located(spec: DatasetSpec, archives: Sequence[Archive], source: Path) -> dict[str, Path]:
    found = {archive.name: source / archive.name for archive in archives if (source / archive.name).exists()}
    missing = [archive.name for archive in archives if archive.needed and archive.name not in found]
    if missing or not found:
        names = ", ".join(archive.name + ("" if archive.needed else " (optional)") for archive in archives)
        lacks = f"{', '.join(missing) or 'all of them'} not found"
        raise RequestError(f"{source}: expected the archives {names}; {lacks}. {spec.how_to_get}")
    return found


def _check_hashes(archives: Sequence[Archive], paths: Mapping[str, Path], meter: ProgressMeter) -> None:
    problems = []
    for name, md5, _ in archives:
        if md5 is None or name not in paths:
            continue
        digest = hashlib.md5(usedforsecurity=False)
        with paths[name].open("rb") as stream:
            for chunk in copied(stream):
                digest.update(chunk)
                meter.add(len(chunk))
        if (actual := digest.hexdigest()) != md5:
            problems.append(f"{paths[name]}: has MD5 {actual}, the published archive {md5}; download it again")
    if problems:
        raise DataError("\n".join(problems))


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name and rename it when it is complete."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.writelines(chunks)
    part.replace(path)


def copied(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield a stream in chunks."""
    while chunk := stream.read(_CHUNK):
        yield chunk


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a directory beside ``path`` that gets its name when the body ends without an error."""
    part = path.with_name(f".{path.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    yield part
    part.rename(path)


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
    random.Random(0).shuffle(files)
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
