"""Errors for users, each mapped to an exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_CANCELLED: Final = 130
_MAX_LISTED: Final = 30
_CLOSE: Final = 0.65
"""Least similarity (``difflib``) of a name that is suggested."""
_PLAINLY: Final = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping of keys") | {
    "tuple_type": "must be a list",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be a text",
    "extra_forbidden": "unknown key",
    "missing": "is missing",
}
"""pydantic's error types -> messages in the terms of YAML."""
UNREADABLE: Final = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""What readers raise where a file is missing, damaged or has another content."""


class AccelmarkError(Exception):
    """An error for the user: what is wrong, where, and what to do; ``exit_code`` is the command line's."""

    exit_code: ClassVar[int] = EXIT_FAILED


class RequestError(AccelmarkError):
    """The request is invalid: an unknown name, a bad file, an impossible combination."""

    exit_code: ClassVar[int] = EXIT_USAGE


class DataError(AccelmarkError):
    """Data or weights are missing, corrupt, or not in the layout that the case requires."""


class RunError(AccelmarkError):
    """A valid request failed: a run could not be carried out or read."""


class WriteError(RunError):
    """A file on this machine cannot be written."""


@dataclass(frozen=True)
class Problem:
    """One problem in a file that a user wrote, or on a host."""

    where: str
    key: str
    what: str
    hint: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        return f"{place}: {self.what}" + (f" ({self.hint})" if self.hint else "")


class SpecError(RequestError):
    """All problems that were found in files or options."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the known names closest to ``name``, else known names, of its section if any."""
    names = sorted(set(known))
    within = [other for other in names if other.startswith(f"{name}.")]
    if not within and (close := closest(name, names)):
        return f"did you mean {' or '.join(map(repr, close))}?"
    section = f"{name.rpartition('.')[0]}."
    listed = within or [other for other in names if other.startswith(section)] or names
    more = f", and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return f"{'it has' if within else 'known:'} {', '.join(listed[:_MAX_LISTED])}{more}" if listed else "none are known"


def closest(name: str, names: Sequence[str]) -> list[str]:
    """Return the names closest to ``name``, at most three: with the same last part (``lr``), else spelt alike."""
    section, _, last = name.rpartition(".")
    ends = {other: other.rpartition(".")[2] for other in names}
    same = [last] if last in ends.values() else difflib.get_close_matches(last, ends.values(), n=1, cutoff=_CLOSE)
    close = [other for other, end in ends.items() if end in same]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    return ([other for other in close if section and other.startswith(f"{section}.")] or close)[:3]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def sentence_of(item: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors."""
    sentence: str = _PLAINLY.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    return sentence[:1].lower() + sentence[1:]


def first_error(error: Any) -> str:
    """Return the place and message of the first of pydantic's errors in a file."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), sentence_of(first))))


@contextmanager
def raising(kind: Callable[[str], Exception], what: str, *caught: type[Exception]) -> Iterator[None]:
    """Raise the errors ``caught`` as ``kind``: ``what`` is wrong (a file and its problem), and the cause."""
    try:
        yield
    except caught as error:
        if type(error).__name__ == "ValidationError":  # pydantic's, which is not loaded here
            text = first_error(error)
        else:
            text = (isinstance(error, OSError) and error.strerror) or first_line(error)
        named = isinstance(error, (LookupError, TypeError, AttributeError))
        raise kind(f"{what}: {type(error).__name__}: {text}" if named else f"{what}: {text}") from error
