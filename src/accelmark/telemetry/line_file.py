"""Append whole lines to a file, even if the disk becomes full."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import final


@final
class LineFile:
    """Appends each line with one write, so that readers never read partial lines.

    A write that fails (disk full) loses its lines and is counted; a partial line is ended before the next one.

    Raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        self.last_error: str | None = None
        self._partial = False
        self._digest = hashlib.sha256()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, text: str) -> bool:
        """Append ``text`` and a line end; return whether all of it was written."""
        data = (b"\n" if self._partial else b"") + text.encode() + b"\n"
        try:
            num_written = os.write(self._fd, data)
            self._digest.update(data[:num_written])
            self._partial = num_written < len(data)
            error = "the disk is full" if self._partial else None
        except OSError as raised:
            error = raised.strerror or str(raised)
        if error is not None:
            self.num_lost += 1
            self.last_error = error
        return error is None

    @property
    def sha256(self) -> str:
        """SHA-256 of the written bytes."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
