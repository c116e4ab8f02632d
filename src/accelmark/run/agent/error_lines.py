"""Extract from a failed program's output the lines that name the error."""

from __future__ import annotations

import re
from typing import Final

from accelmark.spec.secret import without_userinfo

_COMPILER: Final = re.compile(r"^\S+:\d+(:\d+)?: (fatal )?error:|^CMake Error")
_ERROR: Final = re.compile(r"\berror\b|\bE:|cannot|not found|no such file", re.IGNORECASE)
_GENERIC: Final = re.compile(
    r"subprocess-exited-with-error|exited with (error|status|code)|note: This (error|is an issue)|metadata-generation"
    r"|Failed to build|command .* failed with exit",
    re.IGNORECASE,
)
_NUM_LINES: Final = 3
_MAX_LENGTH: Final = 300


def error_lines(text: str) -> str:
    """Return the first lines of ``text`` that name an error, preferably a compiler's; else its last line."""
    lines = [line.strip(" \t│╰─>×") for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _COMPILER.search(line)]
    named = named or [line for line in lines if _ERROR.search(line) and not _GENERIC.search(line)]
    named = named or lines[-1:]
    return "; ".join(without_userinfo(line)[:_MAX_LENGTH] for line in dict.fromkeys(named[:_NUM_LINES]))
