"""Parse FlagPerf's files without executing them: assignments of literals in Python, or YAML."""

from __future__ import annotations

import ast
import io
import keyword
import math
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import read_yaml

MAX_NESTING: Final = 100
"""Maximum nesting of an expression."""


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


def parse_file(path: Path) -> Parsed:
    """Read a ``.py`` or ``.yaml`` file of FlagPerf.

    Raises:
        SpecError: it cannot be read, or its content does not match its suffix.
    """
    if path.suffix in (".yaml", ".yml"):
        return Parsed(str(path), read_yaml(path))
    if path.suffix != ".py":
        raise SpecError([Problem(str(path), "", "is neither a .py nor a .yaml file")])
    parsed = Parsed(str(path), {})
    for statement in _tree(path).body:
        try:
            _take(statement, parsed)
        except OverflowError as error:
            raise SpecError([Problem(str(path), f"line {statement.lineno}", "is too large a number")]) from error
    return parsed


def _tree(path: Path) -> ast.Module:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    deep = _line_of_deep_nesting(source)
    if deep is not None:
        raise SpecError([Problem(str(path), f"line {deep}", f"nests deeper than {MAX_NESTING} levels")])
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        where = f"line {error.lineno}" if error.lineno else ""
        raise SpecError([Problem(str(path), where, f"is not Python: {error.msg}")]) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise SpecError([Problem(str(path), "", f"is not Python: {error or 'nests too deeply'}")]) from error


def _line_of_deep_nesting(source: bytes) -> int | None:
    """Return the first line of a statement whose expressions may nest deeper than ``MAX_NESTING``, else None.

    It counts operators, keywords and open brackets between commas on tokens, since the parser is recursive.
    """
    first: int | None = None
    counts = [0]
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
                first = first or token.start[0]
            if token.type == tokenize.NEWLINE:
                first, counts = None, [0]
            elif token.string in (",", ":"):
                counts[-1] = 0
            elif token.string in tuple(")]}"):
                counts = counts[:-1] or [0]
            elif token.type == tokenize.OP or keyword.iskeyword(token.string):
                counts[-1] += 1
                if token.string in tuple("([{"):
                    counts.append(0)
            if sum(counts) > MAX_NESTING:
                return first
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None  # the parser reports the error
    return None


def _take(statement: ast.stmt, parsed: Parsed) -> None:
    line = f"line {statement.lineno}"
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # docstring
    if isinstance(statement, ast.Import):
        return
    if isinstance(statement, ast.ImportFrom):
        names = ", ".join(alias.name for alias in statement.names)
        if names == "*":
            parsed.taken_whole[line] = statement.module or "."
        else:
            parsed.skipped[line] = f"takes {names} from {statement.module or '.'}, which is not read"
        return
    name, expression = _assignment(statement)
    if name is None or expression is None:
        parsed.skipped[line] = "is code, not a setting"
        return
    parsed.skipped.pop(name, None)
    try:
        parsed.values[name] = _literal(expression)
    except ValueError:
        parsed.values.pop(name, None)
        parsed.skipped[name] = f"is computed, and nothing is executed: {ast.unparse(expression)[:80]}"


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
        value: ast.expr | None = statement.value
    elif isinstance(statement, ast.AnnAssign):
        target, value = statement.target, statement.value
    else:
        return None, None
    return (target.id, value) if isinstance(target, ast.Name) else (None, None)


def _literal(expression: ast.expr) -> Any:
    """Return the value of a literal, or of arithmetic or concatenation of literals.

    Raises:
        ValueError: it is something else.
        OverflowError: a number is too large for a float.
    """
    if isinstance(expression, ast.BinOp):
        value = _joined(expression)
        if isinstance(value, int | float) and not math.isfinite(value):
            raise OverflowError
        return value
    try:
        return ast.literal_eval(expression)
    except (TypeError, SyntaxError) as error:
        raise ValueError(expression) from error


def _joined(expression: ast.BinOp) -> Any:
    left, right = _literal(expression.left), _literal(expression.right)
    numbers = all(isinstance(side, int | float) for side in (left, right))
    texts = all(isinstance(side, str) for side in (left, right))
    if isinstance(expression.op, ast.Add) and (numbers or texts):
        return left + right
    if isinstance(expression.op, ast.Sub) and numbers:
        return left - right
    if isinstance(expression.op, ast.Mult) and numbers:
        return left * right
    if isinstance(expression.op, ast.Div) and numbers and right:
        return left / right
    raise ValueError(expression)
