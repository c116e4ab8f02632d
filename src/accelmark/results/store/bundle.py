"""Pack a run into one file, read runs from such a file, and unpack it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, final

from pydantic_core import from_json

from accelmark.results.store.files import write_errors
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun, RunFiles, loaded_from
from accelmark.results.store.manifest import MANIFEST_FILE, check_manifest, covered_files
from accelmark.results.store.secret_list import SECRETS_FILE, SecretFinder
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.secret import LEFT_OUT, secrets_in, without_userinfo

SUFFIX: Final = ".accelmark.tar"
_MAX_LISTED: Final = 5
_MAX_FILES: Final = 100_000
_MAX_BYTES: Final = 16 * 2**30
_MAX_READ_BYTES: Final = 2**30


def bundle_name(run_dir: Path) -> str:
    """Return the file name of a run's bundle."""
    return f"{run_dir.resolve().name}{SUFFIX}"


def write_bundle(run_dir: Path, output: Path) -> None:
    """Pack the run at ``run_dir`` into ``output``.

    Values of variables with secret names, in the plan and on the hosts, and user parts of URLs are replaced in all
    files; the bundle's manifest covers the files as packed. If the run has a manifest, every file has to match it.

    Raises RunError if it is not a finished run, a file differs from the manifest, or ``output`` cannot be written.
    """
    if not (run_dir / SUMMARY_FILE).is_file():
        raise RunError(f"{run_dir}: is not a finished run (no {SUMMARY_FILE}): run 'accelmark report {run_dir}' first")
    _refuse_changed(run_dir, output)
    secrets = _secrets(run_dir)
    covered = [path for path in covered_files(run_dir) if path.resolve() != output.resolve()]
    hidden = SecretFinder(path for path in covered if path.name == SECRETS_FILE)
    files = {
        path.relative_to(run_dir).as_posix(): _without(path.read_bytes(), secrets, hidden)
        for path in covered
        if path.name != SECRETS_FILE
    }
    packed = pack(run_dir.resolve().name, files)
    with write_errors(output):
        output.write_bytes(packed)


def _refuse_changed(run_dir: Path, output: Path) -> None:
    """Raise RunError if a file differs from the run's manifest, where there is one."""
    place, root = output.resolve(), run_dir.resolve()
    # An earlier bundle in the run directory is not part of the run.
    own = f"{place.relative_to(root).as_posix()}: was added" if place.is_relative_to(root) else ()
    lines = check_manifest(run_dir) if (run_dir / MANIFEST_FILE).is_file() else []
    if changed := [line for line in lines if not line.startswith(own)]:
        more = f"; and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        raise RunError(
            f"{run_dir}: is not bundled because files differ from its manifest: "
            f"{'; '.join(changed[:_MAX_LISTED])}{more}. See 'accelmark verify {run_dir}' and restore the files"
        )


def pack(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return the bundle of ``files`` (path relative to the run -> content) with a manifest."""
    lines = [f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in sorted(files.items())]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in sorted({**files, MANIFEST_FILE: "".join(lines).encode()}.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def unpack(bundle: Path, into: Path) -> tuple[Path, list[str]]:
    """Unpack ``bundle`` below ``into``; return the run's directory, and problems of the archive itself.

    Raises RequestError if it is not a bundle, or an entry is not a plain file or has a path outside of the run.
    """
    try:
        raw, (run, places) = bundle.read_bytes(), _index(bundle)
    except (OSError, RunError) as error:
        raise RequestError(str(error)) from error
    files = {name: raw[offset : offset + size] for name, (offset, size) in places.items()}
    for name, content in files.items():
        target = into / run / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    files.pop(MANIFEST_FILE, None)
    edited = f"{bundle.name}: differs from what 'accelmark bundle' writes: it was edited"
    return into / run, [] if pack(run, files) == raw else [edited]


def _secrets(run_dir: Path) -> list[bytes]:
    """Return the secrets in the plan and the hosts' tasks, longest first."""
    found: set[str] = set()
    for path in [run_dir / "plan.json", *run_dir.glob("*/round*/*_noderank*/*.json")]:
        with contextlib.suppress(OSError, ValueError):
            found |= set(secrets_in(from_json(path.read_bytes())))
    return sorted((value.encode() for value in found), key=len, reverse=True)


def _without(content: bytes, secrets: list[bytes], hidden: SecretFinder) -> bytes:
    if b"\0" not in content:  # text
        content = without_userinfo(content.decode("latin-1")).encode("latin-1")
    for secret in secrets:
        content = content.replace(secret, LEFT_OUT.encode())
    return hidden.without(content)


@final
@dataclass(frozen=True, slots=True)
class BundleFiles(RunFiles):
    """The files of a run in a bundle, read without unpacking it."""

    places: dict[str, tuple[int, int]]
    """Name, relative to the run -> (offset, bytes)."""
    sha256: dict[str, str]

    def read(self, name: str) -> bytes:
        """Return the file ``name``. Raises RunError where it is missing or differs from the manifest."""
        if name not in self.places:
            raise RunError(f"{self.where(name)}: is not in the bundle")
        content = _slice(self.path, *self.places[name])
        if hashlib.sha256(content).hexdigest() != self.sha256.get(name):
            raise RunError(f"{self.where(name)}: was edited: its SHA-256 differs from the manifest's")
        return content

    def has(self, name: str) -> bool:
        """Return whether the bundle has a file ``name``."""
        return name in self.places

    def where(self, name: str) -> str:
        """Return the bundle's path and the file's name in it."""
        return f"{self.path}: {name}"


def is_bundle(path: Path) -> bool:
    """Return whether a file is a tar archive with the manifest of one run."""
    try:
        return MANIFEST_FILE in _index(path)[1]
    except RunError:
        return False


def load_bundle(path: Path, *, curves: bool = True) -> LoadedRun:
    """Read a run from its bundle; ``curves`` as in :func:`accelmark.results.store.loaded_run.load_run`.

    Raises RunError if it is not a bundle, is damaged, or a file that is read was edited.
    """
    _, places = _index(path)
    if MANIFEST_FILE not in places:
        raise RunError(f"{path}: is not a bundle: it has no {MANIFEST_FILE}")
    try:
        lines = _slice(path, *places[MANIFEST_FILE]).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: {MANIFEST_FILE}: is not UTF-8: the bundle is damaged") from error
    sha256 = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return loaded_from(path, BundleFiles(path, places, sha256), curves=curves)


def _index(bundle: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the run's name, and offset and size of each file (relative to the run), without reading contents.

    Raises RunError if it is not a bundle, or an entry is not a plain file, has a path outside of the run or is too
    large.
    """
    runs: set[str] = set()
    places: dict[str, tuple[int, int]] = {}
    num_bytes = 0
    try:
        with tarfile.open(bundle, mode="r:") as archive:
            for entry in archive:
                path = PurePosixPath(entry.name)
                if not entry.isfile():
                    raise RunError(f"{bundle}: {entry.name!r} is not a plain file: refused")
                if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or "\\" in entry.name:
                    raise RunError(f"{bundle}: {entry.name!r} is a path outside of the run: refused")
                num_bytes += entry.size
                if len(places) >= _MAX_FILES or num_bytes > _MAX_BYTES:
                    raise RunError(f"{bundle}: is larger than any run: refused")
                runs.add(path.parts[0])
                places["/".join(path.parts[1:])] = entry.offset_data, entry.size
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        raise RunError(f"{bundle}: is not a bundle of a run, or is damaged: {error}") from error
    if len(runs) != 1:
        raise RunError(f"{bundle}: is not a bundle: it has {len(runs)} top-level directories instead of one")
    return runs.pop(), places


def _slice(path: Path, offset: int, size: int) -> bytes:
    if size > _MAX_READ_BYTES:
        raise RunError(f"{path}: a file in it has {size:,} bytes, more than any result")
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(size)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) != size:
        raise RunError(f"{path}: is truncated")
    return content
