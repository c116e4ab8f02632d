"""Appending whole lines to a file that others read meanwhile, through a full disk too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final


@final
class LineFile:
    """A file that grows by whole lines, each written at once.

    A write that fails (disk full) loses its lines and is counted; a line that was cut off is closed before the next,
    so that no two lines run into each other.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        self.last_error: str | None = None
        self._cut = False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, text: str) -> bool:
        """Append ``text`` and a line end; tell whether it is in the file."""
        data = text.encode() + b"\n"
        if self._cut:
            data = b"\n" + data
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self.num_lost += 1
            self.last_error = error.strerror or str(error)
            return False
        if written < len(data):
            self._cut = True
            self.num_lost += 1
            self.last_error = "the disk is full"
            return False
        self._cut = False
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
