"""Detect changes of a job's data and code while it runs, without reading the files again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, final

from accelmark.run.agent.inotify import IN_MOVE_SELF, Inotify

_MAX_LISTED: Final = 5

_Identity = tuple[int, int, int, int, int]
"""Device, inode, bytes, and the times of the last change of content and of the inode, which no program can set."""


@final
class FileWatch:
    """The files of some directories when it was created, which is before any code of a vendor runs on the host.

    Hashes were checked before that. A file is the same if its inode is and was not changed since: to replace,
    write, rename or restore a file changes the inode's time. Files below a directory that is moved away and back do not
    change, so the kernel reports when the directories, or those above them, are moved.
    """

    def __init__(self, directories: Iterable[Path], skipped: Collection[str] = ()) -> None:
        """Take note of all files, without files named in ``skipped`` and those below directories named so."""
        self._directories, self._skipped = tuple(dict.fromkeys(directories)), frozenset(skipped)
        self._inotify = Inotify()
        before = _Scan(self._directories, self._skipped)
        self._before = before.identities
        self.problem: str | None = None
        """Why moves of some directories are not noticed."""
        self._watched: dict[int, str] = {}
        self._moved: set[str] = set()
        for directory in before.directories:
            try:
                self._watched[self._inotify.watch(directory, IN_MOVE_SELF)] = directory
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.ENOENT):
                    self.problem = f"moves of directories are not noticed from {directory} on: {error}"
                    break

    def changed(self) -> tuple[str, ...]:
        """Return the first few files and directories that are new, gone, moved or written since, and how many more."""
        now = _Scan(self._directories, self._skipped).identities
        self._moved |= {self._watched[number] for number, events in self._inotify.read() if events & IN_MOVE_SELF}
        files = {name for name in self._before.keys() | now.keys() if self._before.get(name) != now.get(name)}
        found = sorted({f"{directory}/ (moved)" for directory in self._moved} | files)
        more = [f"and {len(found) - _MAX_LISTED:,} more"] if len(found) > _MAX_LISTED else []
        return (*found[:_MAX_LISTED], *more)


@final
class _Scan:
    """Files and links below some directories, with the links on the way to them, and all directories on that way."""

    def __init__(self, roots: Iterable[Path], skipped: frozenset[str]) -> None:
        self.identities: dict[str, _Identity] = {}
        self.directories: list[str] = []
        self._seen: set[str] = set()
        left = [self._real(os.path.abspath(root)) for root in roots]  # noqa: PTH100
        scanned: set[str] = set()
        while left:
            directory = left.pop()
            if directory in scanned:  # a link may lead to a directory above it
                continue
            scanned.add(directory)
            try:
                entries = list(os.scandir(directory))
            except OSError:
                continue
            self._visit(directory)
            left += self._note(entry for entry in entries if entry.name not in skipped)

    def _note(self, entries: Iterable[os.DirEntry[str]]) -> Iterator[str]:
        """Note the files of a directory, and yield its directories."""
        for entry in entries:
            try:
                path = self._real(entry.path) if entry.is_symlink() else entry.path
                if entry.is_dir():
                    yield path
                else:
                    self.identities[path] = _identity(entry.stat())
            except OSError:
                continue

    def _real(self, path: str) -> str:
        """Note the links on the way to a file or directory, and return where it is."""
        self._visit(path)
        return os.path.realpath(path)

    def _visit(self, path: str) -> None:
        """Note a directory or link, those above it, and those on the way to a link's target."""
        parent = os.path.dirname(path)  # noqa: PTH120
        if path in self._seen:
            return
        self._seen.add(path)
        if parent != path:
            self._visit(parent)
        try:
            state = os.lstat(path)
            if stat.S_ISLNK(state.st_mode):
                self.identities[path] = _identity(state)
                self._visit(os.path.normpath(os.path.join(os.path.realpath(parent), os.readlink(path))))  # noqa: PTH115, PTH118
            elif stat.S_ISDIR(state.st_mode):
                self.directories.append(path)
        except OSError:
            return


def _identity(state: os.stat_result) -> _Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
