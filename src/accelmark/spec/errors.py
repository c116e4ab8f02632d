"""Errors for users, each mapped to an exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_CANCELLED: Final = 130
_MAX_LISTED: Final = 30
_CLOSE: Final = 0.65
"""Least similarity (``difflib``) of a name that is suggested."""


class AccelmarkError(Exception):
    """An error for the user: what is wrong, where, and what to do; ``exit_code`` is that of the command line."""

    exit_code: ClassVar[int] = EXIT_FAILED


class RequestError(AccelmarkError):
    """The request is invalid: an unknown name, a bad file, an impossible combination."""

    exit_code: ClassVar[int] = EXIT_USAGE


class DataError(AccelmarkError):
    """Data or weights are missing, corrupt, or not in the layout that the case requires."""


class RunError(AccelmarkError):
    """A valid request failed: a run could not be carried out or read."""


@final
@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a file that a user wrote.

    ``where`` is the file (or ``command line``), ``key`` the dotted path inside it, ``what`` the problem as a
    sentence, and ``hint`` the remedy.
    """

    where: str
    key: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        return f"{place}: {self.what}" + (f" ({self.hint})" if self.hint else "")


class SpecError(RequestError):
    """All problems that were found in files or options."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the known name closest to ``name``, else the list of known names.

    Of a dotted name, the last part, its initials or its first words may be enough: ``lr`` and ``learning_rate`` are
    close to ``optimizer.lr``, ``c4`` to ``c4_llama3``. Names in the section of ``name`` come before others.
    """
    names = sorted(set(known))
    section, _, last = name.rpartition(".")
    inside = [each for each in names if section and each.startswith(f"{section}.")]
    close = [] if inside else difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    initials = "".join(word[:1] for word in last.split("_"))
    for among in (inside, names):
        ends = {each.rpartition(".")[2]: each for each in reversed(among)}
        like = difflib.get_close_matches(last, ends, n=1, cutoff=_CLOSE)
        longer = [end for end in ends if end.startswith(f"{last}_")]
        close = close or [ends[end] for end in (*like, initials, *longer) if end in ends]
    if close:
        return f"did you mean {close[0]!r}?"
    listed = inside or names
    more = f", and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return f"known: {', '.join(listed[:_MAX_LISTED])}{more}" if listed else "none are known"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
