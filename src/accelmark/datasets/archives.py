"""Unpack declared files only: members of packages, copied to declared paths, and gzip files."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final, Literal

from accelmark.datasets.spec import DatasetSpec, FileSpec

ArchiveKind = Literal["zip", "tar", "deb"]
Members = Iterator[tuple[str, int, IO[bytes]]]
_CHUNK: Final = 1 << 20


class FetchError(Exception):
    """A source did not deliver the declared files; the message is the reason."""


def extract(kind: ArchiveKind, archive: Path, members: Mapping[str, Path], max_bytes: Mapping[str, int]) -> None:
    """Copy members of ``archive`` to the paths in ``members`` (name in the archive -> file); nothing else is unpacked.

    ``max_bytes`` limits their sizes unpacked. Raises FetchError if the archive is not readable, or a member is missing,
    too large or not a regular file; OSError if a file cannot be written.
    """
    wanted = set(members)
    try:
        for name, size, stream in _OPEN[kind](archive, frozenset(wanted)):
            if size > max_bytes[name]:
                raise FetchError(f"{name} in {archive.name} has {size:,} bytes, expected {max_bytes[name]:,}")
            members[name].parent.mkdir(parents=True, exist_ok=True)
            with members[name].open("wb") as target:
                shutil.copyfileobj(stream, target, _CHUNK)
            wanted.discard(name)
            if not wanted:
                return
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise FetchError(f"{archive.name} is not a readable {kind} archive: {error}") from error
    raise FetchError(f"{archive.name} has no file {', '.join(sorted(wanted))}")


def _zip_members(archive: Path, wanted: frozenset[str]) -> Members:
    with zipfile.ZipFile(archive) as opened:
        infos = {info.filename: info for info in opened.infolist()}
        for name in wanted & infos.keys():
            info = infos[name]
            if info.is_dir() or (info.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                raise FetchError(f"{name} in {archive.name} is not a regular file")
            with opened.open(info) as stream:
                yield name, info.file_size, stream


def _tar_members(archive: Path, wanted: frozenset[str]) -> Members:
    with tarfile.open(archive, "r:*") as opened:
        yield from _regular_files(opened, wanted, archive.name)


def _deb_members(archive: Path, wanted: frozenset[str]) -> Members:
    # Through a pipe: dpkg-deb writes no file and the whole package is never on disk.
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise FetchError("dpkg-deb is not installed") from error
    with process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as opened:
                yield from _regular_files(opened, wanted, archive.name)
        finally:
            process.kill()


def _regular_files(opened: tarfile.TarFile, wanted: frozenset[str], label: str) -> Members:
    for info in opened:
        name = info.name.removeprefix("./")
        if name not in wanted:
            continue
        stream = opened.extractfile(info) if info.isreg() else None
        if stream is None:
            raise FetchError(f"{name} in {label} is not a regular file")
        yield name, info.size, stream


_OPEN: Final = {"zip": _zip_members, "tar": _tar_members, "deb": _deb_members}


def max_source_bytes(file: FileSpec) -> int:
    """Return the largest allowed size of ``file`` in a source: packed, it can slightly exceed its content."""
    return file.bytes if file.packed is None else file.bytes + file.bytes // 1000 + 4096


def unpack_files(spec: DatasetSpec, directory: Path) -> None:
    """Decompress every packed file of ``spec``; raise FetchError if one is damaged or too large, or OSError."""
    for file in spec.files:
        if file.packed is None:
            continue
        source = directory / file.source_path
        size = 0
        try:
            with gzip.open(source, "rb") as packed, (directory / file.path).open("wb") as target:
                while chunk := packed.read(_CHUNK):
                    size += len(chunk)
                    if size > file.bytes:
                        raise FetchError(f"{file.source_path} has more than the expected {file.bytes:,} bytes")
                    target.write(chunk)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise FetchError(f"{file.source_path} cannot be unpacked: {error}") from error
        source.unlink()
