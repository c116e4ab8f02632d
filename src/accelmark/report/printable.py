"""Text from results on a terminal: shown, never obeyed."""

from __future__ import annotations

from typing import Final

_LEFT: Final = frozenset(map(ord, "\n\t"))
_REORDERING: Final = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in _LEFT} | {
    code: f"\\u{code:04x}" for code in _REORDERING
}
"""Control characters, and marks that turn the direction of writing -> how they are shown."""


def printable(text: str) -> str:
    """Return ``text`` with its control characters spelt out: names come from files, and a terminal would obey them."""
    return text.translate(_SHOWN)
