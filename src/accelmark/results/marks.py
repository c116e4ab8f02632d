"""The marks of results in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WORDS: Final = {"made_up_data": "made-up data"}
"""Marks that are written otherwise than with blanks."""


def mark_text(mark: str) -> str:
    """Return a mark as pages and tables write it: ``busy machine``."""
    return _WORDS.get(mark, mark.replace("_", " "))


def marks_text(marks: Iterable[str]) -> str:
    """Return marks in one text, separated by commas; empty without a mark."""
    return ", ".join(map(mark_text, marks))


def with_marks(text: str, marks: Iterable[str]) -> str:
    """Return a text, such as a verdict, with its marks in brackets."""
    found = marks_text(marks)
    return f"{text} ({found})" if found else text
