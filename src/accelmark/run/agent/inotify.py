"""Events of files and directories, as the Linux kernel reports them to this process."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final, final

IN_MODIFY: Final = 0x00000002
"""A file was written, or one in a directory."""
IN_MOVE_SELF: Final = 0x00000800
"""A file or directory was renamed."""
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_HEADER: Final = struct.Struct("iIII")
"""Watch, mask, cookie, and length of the name that follows."""
_READ_BYTES: Final = 2**16


@final
class Inotify:
    """Watches paths; ``descriptor`` becomes readable when something happens, and is None where the kernel has none."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        has_inotify = hasattr(self._libc, "inotify_init1")
        descriptor = int(self._libc.inotify_init1(_NONBLOCK_CLOEXEC)) if has_inotify else -1
        self.descriptor: int | None = descriptor if descriptor >= 0 else None

    def watch(self, path: str, events: int) -> int:
        """Report ``events`` of a path from now on; returns the number of the watch.

        Raises:
            OSError: there is no inotify, no permission, or no watch left (``fs.inotify.max_user_watches``).
        """
        if self.descriptor is None:
            raise OSError("the kernel has no inotify, or this user has no instance left")
        number = int(self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), events))
        if number < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return number

    def read(self) -> list[tuple[int, int]]:
        """Return the watch and the events of everything that happened since the last call."""
        found: list[tuple[int, int]] = []
        while self.descriptor is not None:
            try:
                raw = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            offset = 0
            while offset < len(raw):
                number, events, _, length = _HEADER.unpack_from(raw, offset)
                found.append((number, events))
                offset += _HEADER.size + length
        return found

    def close(self) -> None:
        """Stop watching; also done when the object is freed."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        """Free the descriptor, of which a user has few."""
        self.close()
