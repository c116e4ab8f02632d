"""Writing files so that a killed process or a full disk never leaves half of one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.spec.errors import RunError

_ADVICE: Final = {
    errno.ENOSPC: "the disk is full: free some space, or choose another directory with --out",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another directory with --out",
    errno.EROFS: "the file system is read-only: choose another directory with --out",
    errno.EACCES: "permission denied: choose a place you may write to with --out",
    errno.EPERM: "permission denied: choose a place you may write to with --out",
    errno.ENOTDIR: "a part of the path is a file: choose another directory with --out",
}


@contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunError that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise RunError(f"{path}: cannot be written: {advice}") from error


def write_atomic(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` beside ``path`` and rename it there: a reader sees the old file or the new one, never a part.

    What is ``private`` only the owner of the directory can read: from within a container that is not who writes.

    Raises:
        RunError: it cannot be written; the reason and what to do are named.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming_the_disk(path):
        try:
            with beside.open("w", encoding="utf-8") as file:
                if private:
                    _keep_private(file.fileno(), path.parent)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _keep_private(descriptor: int, directory: Path) -> None:
    """Give an open file to the owner of ``directory`` alone; where that cannot be, it stays as readable as others."""
    owner = directory.stat()
    try:
        if owner.st_uid != os.geteuid():
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError:
        return
    os.fchmod(descriptor, 0o600)


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it.

    Raises:
        RunError: it cannot be made; the reason and what to do are named.
    """
    with naming_the_disk(path):
        path.mkdir(parents=True, exist_ok=True)


def free_mib(path: Path) -> float:
    """Return the MiB that an unprivileged writer has left on the file system of ``path``."""
    return shutil.disk_usage(path).free / 2**20
