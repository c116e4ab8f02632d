"""The log of the libraries that the coordinator uses, mainly asyncssh."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CHATTY: Final = ("asyncssh",)
"""Loggers that write lines for each command on each host at the level ``info``; they start at warnings instead."""


@contextmanager
def library_log(path: Path, level: str) -> Iterator[None]:
    """Append what libraries log at ``level`` or above to ``path``, until the context ends."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY if level == "info" else ():
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.NOTSET)
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
