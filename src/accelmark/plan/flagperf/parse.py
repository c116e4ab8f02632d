"""Reading FlagPerf's files as data: assignments of literals from Python's syntax tree, or YAML. Nothing is executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.yaml_file import read_yaml


@final
@dataclass(frozen=True, slots=True)
class Parsed:
    """The settings of one file, and what in it is no setting."""

    file: str
    values: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    """Name (or ``line N``) -> why it could not be read as data."""


def parse_file(path: Path) -> Parsed:
    """Read a ``.py`` or ``.yaml`` file of FlagPerf.

    Raises:
        SpecError: it cannot be read, or is not of the kind that its name says.
    """
    if path.suffix in (".yaml", ".yml"):
        return Parsed(str(path), dict(read_yaml(path)))
    if path.suffix != ".py":
        raise SpecError([Problem(str(path), "", "is neither a .py nor a .yaml file")])
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except (SyntaxError, ValueError) as error:
        where = f"line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise SpecError([Problem(str(path), where, f"is not Python: {error}")]) from error
    values: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for statement in tree.body:
        _take(statement, values, skipped)
    return Parsed(str(path), values, skipped)


def _take(statement: ast.stmt, values: dict[str, Any], skipped: dict[str, str]) -> None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # a documentation string
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = ", ".join(alias.name for alias in statement.names)
        module = getattr(statement, "module", None)
        if names != "*":
            return
        skipped[f"line {statement.lineno}"] = f"takes everything from {module}, which is not read"
        return
    name, expression = _assignment(statement)
    if name is None or expression is None:
        skipped[f"line {statement.lineno}"] = "is code, not a setting"
        return
    try:
        values[name] = _literal(expression)
    except ValueError:
        values.pop(name, None)
        skipped[name] = f"is computed, and nothing is executed: {ast.unparse(expression)[:80]}"


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
    """Return the value of a literal, or of arithmetic and joining of literals.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(expression, ast.BinOp):
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
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ValueError(expression) from error
