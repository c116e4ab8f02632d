"""Detect changes of a job's data while it runs, without reading the data again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

_MAX_LISTED: Final = 5

_Identity = tuple[int, int, int, int, int]
"""Device, inode, bytes, and the times of the last change of content and of the inode, which no program can set."""


@final
class DataWatch:
    """The files of data directories when it was created, which is before any code of a vendor runs on the host.

    Their hashes were checked before that. A file is the same if its inode is and was not changed since: to replace,
    write, rename or restore a file changes the inode's time.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(directories)
        self._before = self._identities()

    def changed(self) -> tuple[str, ...]:
        """Return the first few files that are new, gone, replaced or were written since, and how many more."""
        now = self._identities()
        found = sorted(name for name in self._before.keys() | now.keys() if self._before.get(name) != now.get(name))
        more = [f"and {len(found) - _MAX_LISTED} more"] if len(found) > _MAX_LISTED else []
        return (*found[:_MAX_LISTED], *more)

    def _identities(self) -> dict[str, _Identity]:
        found: dict[str, _Identity] = {}
        for root in self._directories:
            for directory, _, files in os.walk(root, followlinks=True):
                for name in files:
                    path = os.path.join(directory, name)  # noqa: PTH118  a tree may have a million files
                    try:
                        state = os.stat(path)  # noqa: PTH116
                    except OSError:
                        continue
                    found[path] = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
        return found
