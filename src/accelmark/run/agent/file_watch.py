"""Watch files while a job runs: changes of its data and code, stale bytecode, the times of events in a rank's log."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import marshal
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.machinery import BYTECODE_SUFFIXES
from pathlib import Path
from threading import Thread
from typing import Final

from accelmark.spec.log.perflog import event_names
from accelmark.spec.log.records import ClockReading

_MAX_LISTED: Final = 5
_IN_MODIFY: Final = 0x00000002
"""A file was written, or one in a directory."""
_IN_MOVE_SELF: Final = 0x00000800
"""A file or directory was renamed."""
_EVENT_HEADER: Final = struct.Struct("iIII")
"""Watch, mask, cookie, and length of the name that follows."""
_LOG_BYTES: Final = 2**20
_BYTECODE_HEADER: Final = 16
_HASH_BASED: Final = 0b01
_CHECKED: Final = 0b10

_Identity = tuple[int, int, int, int, int]
"""Device, inode, bytes, and the times of the last change of content and of the inode, which no program can set."""


class FileWatch:
    """The files of some directories when it was created, which is before any code of a vendor runs on the host.

    Hashes were checked before that. A file is the same if its inode is and was not changed since: to replace,
    write, rename or restore a file changes the inode's time. Files below a directory that is moved away and back do not
    change, so the kernel reports when the directories, or those above them, are moved.
    """

    def __init__(self, directories: Iterable[Path], skipped: Collection[str] = ()) -> None:
        """Take note of all files, without files named in ``skipped`` and those below directories named so."""
        self._directories, self._skipped = tuple(dict.fromkeys(directories)), frozenset(skipped)
        self._inotify = _Inotify()
        before = _Scan(self._directories, self._skipped)
        self._before = before.identities
        self.problem: str | None = None
        """Why moves of some directories are not noticed."""
        self._watched: dict[int, str] = {}
        self._moved: set[str] = set()
        for directory in before.directories:
            try:
                self._watched[self._inotify.watch(directory, _IN_MOVE_SELF)] = directory
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.ENOENT):
                    self.problem = f"moves of directories are not noticed from {directory} on: {error}"
                    break

    def changed(self) -> tuple[str, ...]:
        """Return the first files and directories that are new, removed, moved or written since, and how many more."""
        now = _Scan(self._directories, self._skipped).identities
        self._moved |= {self._watched[number] for number, events in self._inotify.read() if events & _IN_MOVE_SELF}
        files = {name for name in self._before.keys() | now.keys() if self._before.get(name) != now.get(name)}
        paths = sorted({f"{directory}/ (moved)" for directory in self._moved} | files)
        more = [f"and {len(paths) - _MAX_LISTED:,} more"] if len(paths) > _MAX_LISTED else []
        return (*paths[:_MAX_LISTED], *more)


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
                entries = [entry for entry in os.scandir(directory) if entry.name not in skipped]
            except OSError:
                continue
            self._visit(directory)
            for entry in entries:
                with suppress(OSError):
                    path = self._real(entry.path) if entry.is_symlink() else entry.path
                    if entry.is_dir():
                        left.append(path)
                    else:
                        self.identities[path] = _identity(entry.stat())

    def _real(self, path: str) -> str:
        """Note the links on the way to a file or directory, and return its real path."""
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
        with suppress(OSError):
            state = os.lstat(path)
            if stat.S_ISLNK(state.st_mode):
                self.identities[path] = _identity(state)
                self._visit(os.path.normpath(os.path.join(os.path.realpath(parent), os.readlink(path))))  # noqa: PTH115, PTH118
            elif stat.S_ISDIR(state.st_mode):
                self.directories.append(path)


def _identity(state: os.stat_result) -> _Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


class _Inotify:
    """Watches paths; ``descriptor`` becomes readable when something happens, and is None where the kernel has none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        descriptor = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self.descriptor: int | None = descriptor if descriptor >= 0 else None

    def watch(self, path: str, events: int) -> int:
        """Report ``events`` of a path from now on; returns the number of the watch.

        Raises OSError: there is no inotify, no permission, or no watch left (``fs.inotify.max_user_watches``).
        """
        if self.descriptor is None:
            raise OSError("the kernel has no inotify, or this user has no instance left")
        number = int(self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), events))
        if number < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return number

    def read(self) -> list[tuple[int, int]]:
        parsed: list[tuple[int, int]] = []
        while self.descriptor is not None:
            try:
                raw = os.read(self.descriptor, 2**16)
            except BlockingIOError:
                break
            offset = 0
            while offset < len(raw):
                number, events, _, length = _EVENT_HEADER.unpack_from(raw, offset)
                parsed.append((number, events))
                offset += _EVENT_HEADER.size + length
        return parsed

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    __del__ = close  # a user has few descriptors


class LogEvents:
    """Records when events appear in a rank's log; ``descriptor`` becomes readable when a file next to it grows."""

    def __init__(self, log: Path) -> None:
        self.seen: dict[str, tuple[ClockReading, ClockReading]] = {}
        self._inotify = _Inotify()
        try:
            self._inotify.watch(str(log.parent), _IN_MODIFY)
        except OSError:
            self._inotify.close()
        self.descriptor = self._inotify.descriptor
        """None where the kernel cannot report changes; events are not timed then."""
        self._log = log
        self._read_bytes = 0

    def look(self) -> None:
        """Read the lines appended to the log since the last call; without a descriptor, nothing can be timed."""
        if not self._inotify.read():
            return
        try:
            with self._log.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read(_LOG_BYTES)
                written_s = os.fstat(file.fileno()).st_ctime
        except OSError:
            return
        end = added.rfind(b"\n") + 1
        # A line longer than a read has no event that matters here.
        self._read_bytes += end or (len(added) if len(added) == _LOG_BYTES else 0)
        now = ClockReading.now()
        # On a busy machine the agent may read late; the kernel records when the rank wrote.
        at = now.earlier(min(max(0.0, now.wall_s - written_s), 5.0))
        for name in event_names(added[:end]):
            first, _ = self.seen.get(name, (at, at))
            self.seen[name] = first, at


class BytecodeCheck:
    """Bytecode below ``folders`` that this Python would load though it is not of its source.

    A file in ``__pycache__`` is loaded if its header has the time and size of the source, whatever its code
    is; one next to no source is a module itself. To compile all sources takes more than a second, so it begins in a
    thread, and :meth:`found` only compiles what has changed since.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(dict.fromkeys(folders))
        self._equal: set[bytes] = set()
        """Hashes of bytecode and source that were compared and are equal."""
        self._first = Thread(target=self._look, daemon=True)
        self._first.start()

    def found(self) -> tuple[str, ...]:
        """Return the files, as they are now."""
        self._first.join()
        return self._look()

    def _look(self) -> tuple[str, ...]:
        return tuple(str(path) for folder in self._folders for path in self._stale(folder))

    def _stale(self, folder: Path) -> Iterator[Path]:
        for source in sorted(folder.rglob("*.py")):
            cached = Path(importlib.util.cache_from_source(str(source)))
            if cached.is_file() and not self._is_of_source(cached, source):
                yield cached
        for suffix in BYTECODE_SUFFIXES:
            for path in sorted(folder.rglob(f"*{suffix}")):
                if path.parent.name != "__pycache__" and not path.with_suffix(".py").exists():
                    yield path

    def _is_of_source(self, cached: Path, source: Path) -> bool:
        try:
            content, text, state = cached.read_bytes(), source.read_bytes(), source.stat()
        except OSError:
            return True  # removed while it was read
        header, body = content[:_BYTECODE_HEADER], content[_BYTECODE_HEADER:]
        if not _is_loaded(header, text, state):
            return True
        seen = sha256(b"".join((str(source).encode(), len(text).to_bytes(8, "little"), text, content))).digest()
        if seen not in self._equal:
            with suppress(SyntaxError, ValueError, EOFError, TypeError):
                if marshal.loads(body) == compile(text, str(source), "exec", dont_inherit=True):  # noqa: S302
                    self._equal.add(seen)
        return seen in self._equal


def _is_loaded(header: bytes, text: bytes, state: os.stat_result) -> bool:
    """Return whether Python would load the bytecode with this header in place of the source."""
    if len(header) < _BYTECODE_HEADER or header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(header[4:8], "little")
    if flags & _HASH_BASED:
        return not flags & _CHECKED or header[8:] == importlib.util.source_hash(text)
    stamp = int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF
    return header[8:] == b"".join(number.to_bytes(4, "little") for number in stamp)
