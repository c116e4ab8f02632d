"""Find bytecode that Python would load in place of a source file with other content."""

from __future__ import annotations

import importlib.util
import marshal
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib.machinery import BYTECODE_SUFFIXES
from pathlib import Path
from threading import Thread
from typing import Final, final

_HEADER_BYTES: Final = 16
_HASH_BASED: Final = 0b01
_CHECKED: Final = 0b10


@final
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
        if not _is_loaded(content[:_HEADER_BYTES], text, state):
            return True
        seen = sha256(b"".join((str(source).encode(), len(text).to_bytes(8, "little"), text, content))).digest()
        if seen not in self._equal and _has_code(content[_HEADER_BYTES:], text, source):
            self._equal.add(seen)
        return seen in self._equal


def _is_loaded(header: bytes, text: bytes, state: os.stat_result) -> bool:
    """Return whether Python would load the bytecode with this header in place of the source."""
    if len(header) < _HEADER_BYTES or header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(header[4:8], "little")
    if flags & _HASH_BASED:
        return not flags & _CHECKED or header[8:] == importlib.util.source_hash(text)
    stamp = int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF
    return header[8:] == b"".join(number.to_bytes(4, "little") for number in stamp)


def _has_code(body: bytes, text: bytes, source: Path) -> bool:
    try:
        return bool(marshal.loads(body) == compile(text, str(source), "exec", dont_inherit=True))  # noqa: S302
    except (SyntaxError, ValueError, EOFError, TypeError):
        return False
