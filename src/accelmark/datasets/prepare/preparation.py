"""Find and verify archives, unpack them, and verify the result; an interrupted preparation continues."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final, final

from accelmark.datasets.spec import DatasetSpec
from accelmark.datasets.verify import Progress, ProgressMeter, verify
from accelmark.spec.errors import DataError, Problem, RequestError, first_line
from accelmark.spec.plugins.requirements import pip_install

_CHUNK: Final = 1 << 20
_RECORD: Final = ".prepared.json"
_PART: Final = ".part"


@final
@dataclass(frozen=True, slots=True)
class Archive:
    """A published file."""

    name: str
    md5: str | None
    """As published; None where no hash is published."""
    needed: bool = True
    """Whether the data set cannot be prepared without it."""


Unpack = Callable[[Mapping[str, Path], Path, ProgressMeter], None]
"""Writes the data set below the second argument from the archives, by name; files that are complete are kept."""


@final
@dataclass(frozen=True, slots=True)
class Preparation:
    """How a data set is made from its archives."""

    archives: Sequence[Archive]
    unpack: Unpack
    unpacked_ratio: float = 1.0
    """Size of the prepared data set in relation to its archives, for the check of free space."""
    module: str | None = None
    """A Python module that ``unpack`` imports."""
    module_from: str = ""
    """The extra of AccelMark that installs the module."""


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

    Archives are verified by their published MD5 once; a second call continues after what is complete.

    Raises:
        RequestError: an archive or a Python module is missing, or there is too little space; nothing was written.
        DataError: an archive is damaged or another one, a file cannot be written, or the result is incomplete.
    """
    if preparation.module is not None and find_spec(preparation.module) is None:
        install = pip_install([f"accelmark[{preparation.module_from}]"])
        raise RequestError(f"{spec.name}: needs the Python module {preparation.module}: {install}")
    archives = _found(spec, preparation.archives, source)
    _check_space(archives.values(), preparation.unpacked_ratio, to)
    with naming_failed_writes(to):
        _check_hashes(preparation.archives, archives, to, progress)
        meter = ProgressMeter(f"unpacking {spec.name}", sum(_sizes(archives.values())), progress)
        preparation.unpack(archives, to, meter)
    written = [part for part in spec.tree if (to / part.path).is_dir()]
    made = spec.model_copy(update={"tree": tuple(written) or spec.tree})
    if problems := verify(made, to, allow_subset=allow_subset, progress=progress):
        raise DataError("\n  ".join([f"{spec.title} in {to} is not complete:", *map(str, problems)]))
    return archives


@contextmanager
def naming_failed_writes(to: Path) -> Iterator[None]:
    """Raise DataError for an error of the operating system, such as a full disk, with what to do."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or to}: {error.strerror or error}"
        raise DataError(f"{what}; the same command continues after what is complete, when that is mended") from error


def _found(spec: DatasetSpec, archives: Sequence[Archive], source: Path) -> dict[str, Path]:
    if not source.is_dir():
        raise RequestError(f"{source}: is not a directory; name the one that contains the archives")
    found = {archive.name: source / archive.name for archive in archives if (source / archive.name).is_file()}
    missing = [archive.name for archive in archives if archive.needed and archive.name not in found]
    if missing or not found:
        names = ", ".join(archive.name + ("" if archive.needed else " (optional)") for archive in archives)
        lacks = f"{', '.join(missing) or 'all of them'} not found"
        raise RequestError(f"{source}: expected the archives {names}; {lacks}. {spec.how_to_get}")
    return found


def _sizes(paths: Iterable[Path]) -> list[int]:
    return [path.stat().st_size for path in paths]


def _check_space(archives: Collection[Path], ratio: float, to: Path) -> None:
    """Raise RequestError where the data set and what was written of it already need more than is free."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        written = sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
        needed, free = ratio * sum(_sizes(archives)) - written, shutil.disk_usage(to).free
    except OSError as error:
        raise RequestError(f"{to}: cannot be written to: {error.strerror or error}") from error
    if needed > free:
        what = f"about {needed / 2**30:,.1f} GiB are needed, {free / 2**30:,.1f} GiB are free"
        raise RequestError(f"{to}: {what}; name another directory with --to")


def _check_hashes(archives: Sequence[Archive], found: Mapping[str, Path], to: Path, progress: Progress | None) -> None:
    """Compare MD5 sums with the published ones; those of unchanged archives are in a record from an earlier call."""
    record = to / _RECORD
    try:
        known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    meter = ProgressMeter("verifying archives", sum(_sizes(found.values())), progress)
    problems = []
    for archive in archives:
        path = found.get(archive.name)
        if path is None:
            continue
        state = path.stat()
        same = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
        before = known.get(archive.name, {})
        if archive.md5 is None or before == {**same, "md5": archive.md5}:
            meter.add(state.st_size)
            continue
        actual = _md5(path, meter)
        if actual != archive.md5:
            what = f"has MD5 {actual} ({state.st_size:,} bytes), the published archive {archive.md5}; download it again"
            problems.append(Problem(str(path), "", what))
            continue
        known[archive.name] = {**same, "md5": actual}
        write_whole(record, [json.dumps(known, indent=1).encode()])
    if problems:
        raise DataError("\n".join(map(str, problems)))


def _md5(path: Path, meter: ProgressMeter) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            meter.add(len(chunk))
    return digest.hexdigest()


@contextmanager
def opened_tar(path: Path, stream: IO[bytes] | None = None) -> Iterator[tarfile.TarFile]:
    """Open a tar archive, or an uncompressed one that is a member of another; raises DataError where it is damaged."""
    try:
        with tarfile.open(path, "r:*" if stream is None else "r:", fileobj=stream) as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error) as error:
        what = first_line(error).rstrip(":")
        raise DataError(f"{path}: is not a readable tar archive: {what}; download it again") from error


def regular_files(archive: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and content of each regular file, in order."""
    for member in archive:
        if member.isreg() and (stream := archive.extractfile(member)) is not None:
            yield member.name.removeprefix("./"), member.size, stream


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name and rename it when it is complete."""
    part = path.with_name(f".{path.name}{_PART}")
    with part.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
    part.replace(path)


def copied(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield a stream in chunks."""
    while chunk := stream.read(_CHUNK):
        yield chunk


def placed(source: Path, target: Path) -> None:
    """Link a published file that needs no unpacking, or copy it where the file system is another one."""
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as stream:
            write_whole(target, copied(stream))


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``path`` that gets its name when the body ends without an error."""
    part = path.with_name(f".{path.name}{_PART}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(path)
