"""Escape control characters in text from files before it is printed on a terminal."""

from __future__ import annotations

from typing import Final

_KEPT: Final = frozenset(map(ord, "\n\t"))
_REORDERING: Final = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in _KEPT} | {
    code: f"\\u{code:04x}" for code in _REORDERING
}
"""Control characters and bidirectional formatting characters to their escapes."""


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, which a terminal would otherwise interpret."""
    return text.translate(_ESCAPES)
