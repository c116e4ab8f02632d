"""Find bytecode that Python would load in place of a source file with other content."""

from __future__ import annotations

import importlib.util
import marshal
from collections.abc import Iterable, Iterator
from importlib.machinery import BYTECODE_SUFFIXES
from pathlib import Path
from typing import Final

_HEADER_BYTES: Final = 16
_HASH_BASED: Final = 0b01
_CHECKED: Final = 0b10


def stale_bytecode(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the bytecode files below ``folders`` that this Python would load though they are not of their source.

    A file in ``__pycache__`` is loaded if the time and size in its header are those of the source, whatever its code
    is; one next to no source is a module itself.
    """
    return tuple(str(path) for folder in dict.fromkeys(folders) for path in _stale(folder))


def _stale(folder: Path) -> Iterator[Path]:
    for source in sorted(folder.rglob("*.py")):
        cached = Path(importlib.util.cache_from_source(str(source)))
        if cached.is_file() and not _is_of_source(cached, source):
            yield cached
    for suffix in BYTECODE_SUFFIXES:
        for path in sorted(folder.rglob(f"*{suffix}")):
            if path.parent.name != "__pycache__" and not path.with_suffix(".py").exists():
                yield path


def _is_of_source(cached: Path, source: Path) -> bool:
    """Return whether a cache file has the code of its source, or would not be loaded."""
    try:
        content, text, state = cached.read_bytes(), source.read_bytes(), source.stat()
    except OSError:
        return True  # removed while it was read
    header, body = content[:_HEADER_BYTES], content[_HEADER_BYTES:]
    if len(header) < _HEADER_BYTES or header[:4] != importlib.util.MAGIC_NUMBER:
        return True
    flags = int.from_bytes(header[4:8], "little")
    if flags & _HASH_BASED:
        is_loaded = not flags & _CHECKED or header[8:] == importlib.util.source_hash(text)
    else:
        stamp = int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF
        is_loaded = header[8:] == b"".join(number.to_bytes(4, "little") for number in stamp)
    if not is_loaded:
        return True
    try:
        return bool(marshal.loads(body) == compile(text, str(source), "exec", dont_inherit=True))  # noqa: S302
    except (SyntaxError, ValueError, EOFError, TypeError):
        return False
