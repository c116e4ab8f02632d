"""Parse FlagPerf's files without executing them: assignments of literals in Python, or YAML; list its models."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import load_yaml, read_text, read_yaml

T = TypeVar("T")
Values = dict[str, Any]
Task = Literal["train", "infer"]
_LONGEST: Final = 10_000
"""Characters of a text that is put together from others."""
_LARGEST: Final = 1e30
_ASSIGNED: Final = re.compile(r"^([A-Za-z_]\w*)[ \t]*=[ \t]*", re.MULTILINE)
"""The start of ``VENDOR = "nvidia"``, as FlagPerf's README writes in ``host.yaml``."""
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TABLES: Final = read_yaml(Path(__file__).with_name("settings.yaml"))
"""FlagPerf's settings and what AccelMark has in their place."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """A model of FlagPerf and its equivalent."""

    task: Task
    model: str
    """Name in FlagPerf's keys."""
    frameworks: str = ""
    """Frameworks that FlagPerf has it in."""
    case: str | None = None
    """The case that carries it, or its nearest equivalent; None: there is none."""
    note: str = ""
    """What differs, or why no case carries it."""


@cache
def coverage() -> Sequence[Coverage]:
    """Return all models of FlagPerf from ``coverage.yaml``, training first."""
    table = read_yaml(Path(__file__).with_name("coverage.yaml"))
    tasks: tuple[Task, Task] = ("train", "infer")
    return tuple(Coverage(task, **row) for task in tasks for row in table[task])


def equivalent(model: str, task: Task) -> Coverage | None:
    """Return the entry of a model in FlagPerf's keys, or None where it is none of FlagPerf's."""
    return next((entry for entry in coverage() if (entry.model, entry.task) == (model, task)), None)


def case_of_model(model: str, task: Task) -> str:
    """Return the case that carries a model of FlagPerf, else the model's own name."""
    covered = equivalent(model, task)
    return model if covered is None or covered.case is None else covered.case


class Given(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Parsed:
    """The settings of one file, and its other statements."""

    file: str
    values: Values
    skipped: dict[str, str] = field(default_factory=dict)
    """Name (or ``line N``) -> why it could not be read as data."""

    def settings(self) -> list[Given]:
        """Return every setting of the file."""
        return [Given(self.file, key, value) for key, value in self.values.items()]

    def unread(self, *others: str) -> list[Problem]:
        """Return its statements that were not read, but for those that take all of ``others``, which are read too."""
        known = tuple(f"takes * from {module}," for module in others)
        return [Problem(self.file, key, why) for key, why in self.skipped.items() if not why.startswith(known)]


def parse_file(path: Path) -> Parsed:
    """Read a ``.py`` or ``.yaml`` file of FlagPerf; raise SpecError if it is neither or cannot be read."""
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        parsed = Parsed(str(path), load_yaml(_ASSIGNED.sub(r"\1: ", text), path))
        for line in _ASSIGNED.finditer(text):
            number = text.count("\n", 0, line.start()) + 1
            parsed.skipped[f"line {number}"] = f"is no YAML ({line[1]} = ...): read as {line[1]}: ..."
        if parsed.values.get("CASES", {}) is None:  # its keys are not indented
            parsed.values["CASES"] = {
                key: parsed.values.pop(key) for key in [*parsed.values] if ":" in str(key)
            } or None
        return parsed
    parsed = Parsed(str(path), {})
    try:
        for statement in ast.parse(text, str(path)).body:
            _take(statement, parsed)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"is not readable as Python: {error or type(error).__name__}"
        raise SpecError([Problem(str(path), "", what)]) from error
    return parsed


def _take(statement: ast.stmt, parsed: Parsed) -> None:
    line = f"line {statement.lineno}"
    match statement:
        case ast.Import() | ast.Expr(value=ast.Constant()):  # or a docstring
            return
        case ast.ImportFrom(module=module, names=aliases):
            names = ", ".join(alias.name for alias in aliases)
            parsed.skipped[line] = f"takes {names} from {module or '.'}, which is read only if it is imported, too"
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=expression)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression)
        ):
            parsed.skipped.pop(name, None)
            try:
                parsed.values[name] = _literal(expression, parsed.values)
            except (ValueError, TypeError, SyntaxError, ArithmeticError):
                parsed.values.pop(name, None)
                written = ast.unparse(expression)[:80]
                parsed.skipped[name] = f"the value is an expression, and the importer runs no code: {written}"
        case _:
            parsed.skipped[line] = "is code, not a setting"


def _literal(expression: ast.expr, names: Values) -> Any:
    """Return the value of literals, of ``names`` assigned before, and their arithmetic; raises errors for all else."""
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
