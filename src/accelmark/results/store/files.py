"""Write files atomically, and report errors of the file system."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.spec.errors import WriteError

_ELSEWHERE: Final = "choose another directory with --out (on a host reached by SSH: work_directory in the cluster file)"
_ADVICE: Final = {
    errno.ENOSPC: f"the disk is full: free some space, or {_ELSEWHERE}",
    errno.EDQUOT: f"the disk quota is used up: free some space, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is read-only: {_ELSEWHERE}",
    errno.EACCES: "permission denied: choose a writable directory with --out",
    errno.EPERM: "permission denied: choose a writable directory with --out",
    errno.ENOTDIR: "a part of the path is a file: choose another directory with --out",
}


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError with ``path`` and advice."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise WriteError(f"{path}: cannot be written: {advice}") from error


def write_atomic(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` to a temporary file and rename it to ``path``: readers see the old file or the new one.

    A device or a pipe, such as ``/dev/null``, is written to and never replaced. A ``private`` file is readable only by
    the owner of the directory, which is not the writer in a container.

    Raises WriteError if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with write_errors(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        try:
            with temporary.open("w", encoding="utf-8") as file:
                if private:
                    _make_private(file.fileno(), path.parent)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _make_private(descriptor: int, directory: Path) -> None:
    """Restrict an open file to the owner of ``directory``; unchanged where the owner cannot be set."""
    owner = directory.stat()
    try:
        if owner.st_uid != os.geteuid():
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError:
        return
    os.fchmod(descriptor, 0o600)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents. Raises WriteError if it cannot be created."""
    with write_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def free_mib(path: Path) -> float:
    """Return the free MiB on the file system of ``path`` for an unprivileged user."""
    return shutil.disk_usage(path).free / 2**20
