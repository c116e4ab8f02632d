"""Parse FlagPerf's files without executing them: assignments of literals in Python, or YAML."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, final

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import load_yaml, read_text, read_yaml

T = TypeVar("T")
Values = dict[str, Any]
_LONGEST: Final = 10_000
"""Characters of a text that is put together from others."""
_LARGEST: Final = 1e30
_ASSIGNED: Final = re.compile(r"^([A-Za-z_]\w*)[ \t]*=[ \t]*", re.MULTILINE)
"""The start of ``VENDOR = "nvidia"``, as FlagPerf's README writes in ``host.yaml``."""
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TABLES: Final = read_yaml(Path(__file__).with_name("settings.yaml"))
"""FlagPerf's settings and what AccelMark has in their place."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """One setting and its location."""

    file: str
    key: str
    value: Any

    @property
    def is_set(self) -> bool:
        """Whether it has a value; None and blank strings count as none."""
        return self.value is not None and not (isinstance(self.value, str) and not self.value.strip())

    def left(self, why: str) -> Problem:
        """Return the problem that reports why it was not converted."""
        return Problem(self.file, self.key, why)

    def read(self, kind: Callable[[Any], T]) -> T:
        """Return the value converted by ``kind``; raise SpecError if that fails."""
        try:
            return kind(self.value)
        except (ValueError, TypeError) as error:
            raise SpecError([self.left(f"{error}, found {self.value!r}")]) from error


@final
@dataclass(frozen=True, slots=True)
class Parsed:
    """The settings of one file, and its other statements."""

    file: str
    values: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    """Name (or ``line N``) -> why it could not be read as data."""
    taken_whole: dict[str, str] = field(default_factory=dict)
    """``line N`` -> the module of a ``from M import *`` in this line."""

    def settings(self) -> list[Given]:
        """Return every setting of the file."""
        return [Given(self.file, key, value) for key, value in self.values.items()]


def parse_file(path: Path) -> Parsed:
    """Read a ``.py`` or ``.yaml`` file of FlagPerf; raise SpecError if it is neither or cannot be read."""
    if path.is_dir():
        raise SpecError([Problem(str(path), "", "is a directory", "name the files in it")])
    if path.suffix in (".yaml", ".yml"):
        text = read_text(path)
        content = Parsed(str(path), load_yaml(_ASSIGNED.sub(r"\1: ", text), path))
        for line in _ASSIGNED.finditer(text):
            number = text.count("\n", 0, line.start()) + 1
            content.skipped[f"line {number}"] = f"is no YAML ({line[1]} = ...): read as {line[1]}: ..."
        if content.values.get("CASES", {}) is None:
            cases = {key: content.values.pop(key) for key in [*content.values] if ":" in str(key)}
            content.values["CASES"] = cases or None
        return content
    if path.suffix != ".py":
        raise SpecError([Problem(str(path), "", "is neither a .py nor a .yaml file")])
    parsed = Parsed(str(path), {})
    try:
        for statement in ast.parse(path.read_bytes(), str(path)).body:
            _take(statement, parsed)
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise SpecError(
            [Problem(str(path), "", f"is not readable as Python: {error or type(error).__name__}")]
        ) from error
    return parsed


def _take(statement: ast.stmt, parsed: Parsed) -> None:
    line = f"line {statement.lineno}"
    match statement:
        case ast.Import() | ast.Expr(value=ast.Constant()):  # or a docstring
            return
        case ast.ImportFrom(module=module, names=[ast.alias(name="*")]):
            parsed.taken_whole[line] = module or "."
        case ast.ImportFrom(module=module, names=aliases):
            names = ", ".join(alias.name for alias in aliases)
            parsed.skipped[line] = f"takes {names} from {module or '.'}, which is not read"
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=expression)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression)
        ):
            parsed.skipped.pop(name, None)
            try:
                parsed.values[name] = _literal(expression, parsed.values)
            except (ValueError, TypeError, SyntaxError, ArithmeticError):
                parsed.values.pop(name, None)
                parsed.skipped[name] = (
                    f"the value is an expression, and the importer runs no code: {ast.unparse(expression)[:80]}"
                )
        case _:
            parsed.skipped[line] = "is code, not a setting"


def _literal(expression: ast.expr, names: Values) -> Any:
    """Return the value of literals, of ``names`` assigned before, and their arithmetic or concatenation.

    Raises ValueError, TypeError, SyntaxError or ArithmeticError for any other expression.
    """
    match expression:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, names) for item in items]
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return {_literal(key, names): _literal(item, names) for key, item in zip(keys, items, strict=True) if key}
        case ast.BinOp(left=first, right=second, op=operation):
            left, right = _literal(first, names), _literal(second, names)
        case _:
            return ast.literal_eval(expression)
    kind = type(operation)
    are_texts = isinstance(left, str) and isinstance(right, str) and kind is ast.Add
    if kind not in _OPERATORS or not (are_texts or (isinstance(left, int | float) and isinstance(right, int | float))):
        raise ValueError(expression)
    value = _OPERATORS[kind](left, right)
    if len(value) > _LONGEST if isinstance(value, str) else not abs(value) < _LARGEST:
        raise ValueError(expression)
    return value


def text(value: Any) -> str:
    """Convert a string or an integer to a string."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError("is not text")


def texts(value: Any) -> list[str]:
    """Convert a list of strings, or a string separated by commas or blanks."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise TypeError("is neither a list nor text")
    return [text(item) for item in value]


def whole(value: Any) -> int:
    """Convert an integer, or a string that contains one."""
    written = "" if isinstance(value, float) else text(value)
    if not written.isascii() or not written.isdigit():
        raise ValueError("is not a whole number")
    return int(written)


def flag(value: Any) -> bool:
    """Convert True or False."""
    if isinstance(value, bool):
        return value
    raise TypeError("is neither True nor False")
