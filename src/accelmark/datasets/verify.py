"""Verify that a directory contains a data set: files by SHA-256, trees by their layout; report progress."""

from __future__ import annotations

import hashlib
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Optional

from accelmark.datasets.shards import shard_images, shards_in
from accelmark.datasets.spec import DatasetSpec, TreePart
from accelmark.spec.errors import Problem
from accelmark.spec.number_format import counted

Progress = Callable[[str, int, Optional[int]], None]
"""Called with the activity, the bytes done, and the total bytes (None: unknown)."""

INTERVAL_S: Final = 0.1
_CHUNK: Final = 1 << 20
_SHOWN: Final = 8
_SAMPLED: Final = 64
"""Places whose contents are hashed: where 5 % of the files have other contents, 96 % of samples show it."""


class ProgressMeter:
    """Counts bytes and reports them ten times a second, and at the end."""

    def __init__(self, activity: str, total: int | None, progress: Progress | None) -> None:
        self._what, self._total, self._progress = activity, total, progress
        self._done, self._reported_s = 0, 0.0

    def add(self, amount: int) -> None:
        """Add ``amount`` bytes; no more than the total is reported."""
        self._done += amount
        done = self._done if self._total is None else min(self._done, self._total)
        now_s = time.monotonic()
        if self._progress is not None and (done == self._total or now_s - self._reported_s >= INTERVAL_S):
            self._reported_s = now_s
            self._progress(self._what, done, self._total)

    def counted(self, files: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield names and bytes of files, and add the bytes."""
        for file in files:
            self.add(file[1])
            yield file


def verify(
    spec: DatasetSpec, path: Path, *, allow_subset: bool = False, progress: Progress | None = None
) -> list[Problem]:
    """Return every difference between ``path`` and ``spec``.

    ``allow_subset`` accepts a tree with fewer classes or files than the full set.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        return [Problem(str(path), "", what, _remedy(spec, path))]
    if problems := outline(spec, path):
        return problems
    try:
        if spec.tree:
            meter = ProgressMeter(f"counting the files of {spec.name}", None, progress)
            return [problem for part in spec.tree for problem in _tree_problems(part, path, allow_subset, meter)]
        meter = ProgressMeter(f"checking {spec.name}", spec.bytes, progress)
        for file in spec.files:
            place = path / file.path
            if (actual := file_sha256(place, meter)) != file.sha256:
                has = f"has SHA-256 {actual} ({place.stat().st_size:,} bytes)"
                what = f"{has}, expected {file.sha256} ({file.bytes:,} bytes)"
                problems.append(Problem(str(place), "", what, _remedy(spec, place)))
        return problems
    except OSError as error:
        return [_unreadable(error, path)]


def outline(spec: DatasetSpec, path: Path) -> list[Problem]:
    """Return the missing parts of the directory ``path`` at a glance: files, and parts of a tree without a sample.

    Nothing is read or counted, so that it takes no time where there are millions of files.
    """
    try:
        problems = [problem for part in spec.tree for problem in _part_outline(part, path)]
        missing = [file.path for file in spec.files if not (path / file.path).is_file()]
        if missing:
            expected = _some([file.path for file in spec.files])
            what = f"lacks files of {spec.name}: expected {expected}; {_listing(path)}; missing {_some(missing)}"
            if len(missing) == len(spec.files):
                what = f"lacks all files of {spec.name}: expected {expected}; {_listing(path)}"
            problems.append(Problem(str(path), "", what, _remedy(spec, path)))
    except OSError as error:
        return [_unreadable(error, path)]
    return problems


def _unreadable(error: OSError, path: Path) -> Problem:
    return Problem(str(error.filename or path), "", f"cannot be read: {error.strerror}", "check its permissions")


def fingerprint(spec: DatasetSpec, path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 over the sorted (path, sha256) of the files in ``path``.

    It equals ``spec.fingerprint`` for exact files; for trees, which may have a million files, it uses sizes. Raises
    OSError if a file cannot be read.
    """
    if spec.tree:
        meter = ProgressMeter(f"hashing names and sizes of {spec.name}", None, progress)
        lines = [f"{name}\0{size}" for part in spec.tree for name, size in meter.counted(_tree_files(part, path))]
    else:
        meter = ProgressMeter(f"hashing {spec.name}", spec.bytes, progress)
        lines = [f"{file.path}\0{file_sha256(path / file.path, meter)}" for file in spec.files]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


class DataReads:
    """The files below directories of data that this process and its forks open, by Python's audit events.

    A library that opens files itself does not raise them: its caller does (``sys.audit``).
    """

    def __init__(self, dirs: Mapping[str, Path]) -> None:
        """Note files from now on; an audit hook cannot be removed."""
        self._dirs = dirs
        self._below = tuple(f"{path}{os.sep}" for path in dirs.values())
        self._seen: set[str] = set()
        if dirs:
            self._names, path = tempfile.mkstemp()  # open until this process ends: forks write into it
            Path(path).unlink()
            sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not arguments[0].startswith(self._below):
            return
        if arguments[0] not in self._seen:
            self._seen.add(arguments[0])
            os.write(self._names, f"{arguments[0]}\0".encode())

    def sample(self, draw: str) -> dict[str, dict[str, str]]:
        """Return name of the data -> ``<file>@<offset>`` -> SHA-256 of up to 1 MiB from there.

        ``draw``, a secret until now, chooses the files and places. Raises OSError if a file cannot be read.
        """
        if not self._dirs:
            return {}
        names = os.pread(self._names, os.fstat(self._names).st_size, 0).decode()
        opened = {Path(name) for name in names.split("\0") if name}
        chance = random.Random(draw)
        contents: dict[str, dict[str, str]] = {}
        for data, below in self._dirs.items():
            files = sorted(path for path in opened if below in path.parents and path.is_file())
            contents[data] = {}
            for path in chance.sample(files, min(_SAMPLED, len(files))):
                offset = _CHUNK * chance.randrange(max(1, math.ceil(path.stat().st_size / _CHUNK)))
                contents[data][f"{path.relative_to(below)}@{offset}"] = _chunk_sha256(path, offset)
        return contents


def sample_differences(recorded: Mapping[str, str], path: Path) -> Iterator[str]:
    """Yield the places of a sample of :class:`DataReads` at which ``path`` has other contents, or no file."""
    for place, sha256 in recorded.items():
        name, _, offset = place.rpartition("@")
        try:
            is_same = _chunk_sha256(path / name, int(offset)) == sha256
        except (OSError, ValueError):
            is_same = False
        if not is_same:
            yield place


def _chunk_sha256(path: Path, offset: int) -> str:
    with path.open("rb") as stream:
        stream.seek(offset)
        return hashlib.sha256(stream.read(_CHUNK)).hexdigest()


def file_sha256(path: Path, meter: ProgressMeter | None = None) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            if meter is not None:
                meter.add(len(chunk))
    return digest.hexdigest()


def _remedy(spec: DatasetSpec, place: Path) -> str:
    if spec.how_to_get:
        return spec.how_to_get
    return f"replace {place.name}, or give no directory so that it is fetched" if spec.sources else "get it again"


def _tree_problems(part: TreePart, path: Path, allow_subset: bool, meter: ProgressMeter) -> Iterator[Problem]:
    names = [name for name, _ in meter.counted(_tree_files(part, path))]
    counts: list[str] = []
    if part.by_class and not part.depth and not _is_sharded(part, path):
        filled = {name.split("/")[-2] for name in names}
        if part.classes and len(filled) != part.classes and not (allow_subset and len(filled) < part.classes):
            counts.append(f"{len(filled):,} {'class' if len(filled) == 1 else 'classes'}")
    if part.files and len(names) != part.files and not (allow_subset and len(names) < part.files):
        counts.append(counted(len(names), "file"))
    if counts:
        what = f"expected {part.describe()}; found {', '.join(counts)}"
        yield Problem(str(path / part.path), "", what)


def _part_outline(part: TreePart, path: Path) -> Iterator[Problem]:
    """Yield the problem of a part whose directory is missing, or has no sample."""
    place, expected = path / part.path, f"expected {part.describe()}"
    if not place.is_dir():
        yield Problem(str(path), part.path, f"{expected}; {_listing(path)}", "give the directory that contains it")
    elif next(_tree_files(part, path), None) is None:
        yield Problem(str(place), "", f"{expected}; {_listing(place)}, no such file")


def _is_sharded(part: TreePart, root: Path) -> bool:
    return part.shards and bool(shards_in(root / part.path))


def _tree_files(part: TreePart, root: Path) -> Iterator[tuple[str, int]]:
    """Yield (path below the root, bytes) of each sample of ``part``; a damaged shard raises DataError."""
    suffixes = tuple(suffix.lower() for suffix in part.suffixes)
    if _is_sharded(part, root):
        for shard in shards_in(root / part.path):
            for image in shard_images(shard):
                yield f"{part.path}/{shard.name}/{image.name}", image.size
        return
    if part.depth:
        for path in (root / part.path).glob("*/" * part.depth + "*"):
            if path.name.lower().endswith(suffixes):
                yield path.relative_to(root).as_posix(), path.stat().st_size
        return
    below = [part.path]
    if part.by_class:
        below = [f"{part.path}/{entry.name}" for entry in sorted((root / part.path).iterdir()) if entry.is_dir()]
    for directory in below:
        with os.scandir(root / directory) as entries:
            for entry in entries:
                if entry.name.lower().endswith(suffixes) and entry.is_file():
                    yield f"{directory}/{entry.name}", entry.stat().st_size


def _listing(place: Path) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in place.iterdir())
    return f"found {_some(names)}" if names else "found it empty"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else shown
