"""A run read from its bundle without unpacking it: only what is asked for, each file held against the manifest."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.results.store.store import MANIFEST_FILE, LoadedRun, loaded_from
from accelmark.spec.errors import RunError

SUFFIX: Final = ".accelmark.tar"
_MAX_FILES: Final = 100_000
_MAX_FILE_BYTES: Final = 2**30
_MAGIC_AT: Final = 257


@final
@dataclass(frozen=True, slots=True)
class BundleFiles:
    """The files of a run inside a bundle."""

    path: Path
    run: str
    """Directory of the run in the bundle."""
    places: dict[str, tuple[int, int]]
    """Name, relative to the run -> (offset, bytes)."""
    sha256: dict[str, str]

    def read(self, name: str) -> bytes:
        """Return the file ``name``; raises RunError where it is missing or not as it was packed."""
        if name not in self.places:
            raise RunError(f"{self.where(name)}: cannot be read: the bundle does not hold it")
        content = _slice(self.path, *self.places[name])
        if hashlib.sha256(content).hexdigest() != self.sha256.get(name):
            raise RunError(f"{self.where(name)}: is not as it was packed: its SHA-256 is not the manifest's")
        return content

    def has(self, name: str) -> bool:
        """Tell whether the bundle holds ``name``."""
        return name in self.places

    def where(self, name: str) -> str:
        """Return the bundle and the file in it."""
        return f"{self.path}: {name}"


def is_bundle(path: Path) -> bool:
    """Tell whether a file is a tar that begins as bundles do: with the manifest of one run, or a file beside it."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
        if head[_MAGIC_AT : _MAGIC_AT + 5] != b"ustar":
            return False
        return any(len(parts) == 2 and parts[1] == MANIFEST_FILE for parts in map(_parts, _index(path)))
    except (OSError, RunError):
        return False


def load_bundle(path: Path, *, curves: bool = True) -> LoadedRun:
    """Read a run from its bundle; ``curves`` as in :func:`accelmark.results.store.store.load_run`.

    Raises:
        RunError: it is no bundle, is damaged, or what is read of it is not as it was packed.
    """
    entries = _index(path)
    names = {_parts(name)[0] for name in entries if _parts(name)}
    if len(names) != 1:
        raise RunError(f"{path}: is not a bundle: it holds {len(names)} directories instead of one run")
    (run,) = names
    places = {name.removeprefix(f"{run}/"): place for name, place in entries.items()}
    if MANIFEST_FILE not in places:
        raise RunError(f"{path}: is not a bundle: it holds no {MANIFEST_FILE}")
    try:
        lines = _slice(path, *places[MANIFEST_FILE]).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: {MANIFEST_FILE}: is not text: the bundle is damaged") from error
    sha256 = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return loaded_from(path, BundleFiles(path, run, places, sha256), curves=curves)


def _parts(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts


def _index(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each file of the archive begins, and its size; contents are not read."""
    places: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, mode="r:") as archive:
            for entry in archive:
                if not entry.isfile() or entry.size > _MAX_FILE_BYTES or len(places) >= _MAX_FILES:
                    raise RunError(f"{path}: {entry.name!r} is nothing that a bundle of a run holds")
                places[entry.name] = entry.offset_data, entry.size
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        raise RunError(f"{path}: is not a bundle of a run, or is damaged: {error}") from error
    return places


def _slice(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(size)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) != size:
        raise RunError(f"{path}: is damaged: it ends early")
    return content
